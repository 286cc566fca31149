//! A GPU's clock and energy, by NVIDIA's management library.

use moebius::cuda::Cuda;
use nvml_wrapper::enum_wrappers::device::Clock;
use nvml_wrapper::{Device, Nvml};

pub struct Meter {
    nvml: Nvml,
    /// As NVML names the GPU, whatever number CUDA gives it.
    uuid: String,
}

impl Meter {
    /// That of a device's GPU.
    ///
    /// # Errors
    ///
    /// The library is not there, or does not know the GPU.
    pub fn new(cuda: &Cuda) -> Result<Self, String> {
        let bytes = cuda.stream().context().uuid().map_err(|e| format!("{e:?}"))?.bytes;
        let hex =
            |from: usize, to: usize| bytes[from..to].iter().map(|b| format!("{:02x}", *b as u8)).collect::<String>();
        let uuid = format!("GPU-{}-{}-{}-{}-{}", hex(0, 4), hex(4, 6), hex(6, 8), hex(8, 10), hex(10, 16));
        let nvml = Nvml::init().map_err(|e| e.to_string())?;
        nvml.device_by_uuid(uuid.as_str()).map_err(|e| format!("{uuid}: {e}"))?;
        Ok(Self { nvml, uuid })
    }

    fn device(&self) -> Option<Device<'_>> {
        self.nvml.device_by_uuid(self.uuid.as_str()).ok()
    }

    /// The clock of the SMs now, in MHz.
    pub fn sm_mhz(&self) -> Option<u32> {
        self.device()?.clock_info(Clock::SM).ok()
    }

    /// What the GPU has taken since its driver was loaded.
    pub fn millijoules(&self) -> Option<u64> {
        self.device()?.total_energy_consumption().ok()
    }
}

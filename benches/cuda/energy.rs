//! A GPU's clock and energy, by NVIDIA's management library.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

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
    fn millijoules(&self) -> Option<u64> {
        self.device()?.total_energy_consumption().ok()
    }

    /// The power, in watts, while `work` runs. The counter moves every 20 to 100 ms, so that what it has at `work`'s own ends is
    /// off by up to a move: the power is that between its first and its last move meanwhile. `None` where it moves less than twice.
    pub fn watts_of<T>(&self, work: impl FnOnce() -> T) -> (T, Option<f64>) {
        let running = AtomicBool::new(true);
        thread::scope(|scope| {
            let watts = scope.spawn(|| self.watts_while(&running));
            let done = work();
            running.store(false, Ordering::Relaxed);
            (done, watts.join().ok().flatten())
        })
    }

    fn watts_while(&self, running: &AtomicBool) -> Option<f64> {
        let mut counter = self.millijoules()?;
        let (mut first, mut last) = (None, None);
        while running.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(1));
            let now = self.millijoules()?;
            if now != counter {
                counter = now;
                last = Some((Instant::now(), now));
                first = first.or(last);
            }
        }
        let ((began, from), (ended, to)) = first.zip(last)?;
        let seconds = ended.duration_since(began).as_secs_f64();
        (seconds > 0.0).then(|| to.wrapping_sub(from) as f64 / 1e3 / seconds)
    }
}

//! What a caller gets wrong is an error, also where only the GPU can see it.

use moebius::cuda::Cuda;
use moebius::kernels::*;
use moebius::{DType, Error, Tensor};

use crate::harness::{Case, Data, on_gpu, tests};

tests!(nan_logits_name_token_and_expert, maps_outside_are_reported_and_not_followed, f64_is_refused,);

fn tensor<T: moebius::cpu::Element>(cuda: &Cuda, values: Vec<T>, dims: &[usize]) -> Tensor<Cuda> {
    Tensor::from_vec(values, dims).expect("values").to(cuda).expect("a tensor")
}

fn nan_logits_name_token_and_expert(cuda: &Cuda) {
    let case = Case::new(moebius::MoeConfig::new(16, 8, 4, 2), 6, DType::F32);
    let mut data = Data::new(&case).expect("inputs");
    let mut x = data.x.to_f64();
    x[3 * 16] = f64::NAN;
    data.x = moebius::cpu::Cpu::new().write(&x, DType::F32, &[6, 16]).expect("x");
    let error = on_gpu(&case, &data, cuda).err();
    assert!(matches!(error, Some(Error::NanLogits { token: 3, expert: 0, .. })), "{error:?}");
    // The next call is not blamed for it.
    on_gpu(&case, &Data::new(&case).expect("inputs"), cuda).expect("a good run");
}

fn maps_outside_are_reported_and_not_followed(cuda: &Cuda) {
    let source = tensor(cuda, vec![1f32, 2.0, 3.0, 4.0], &[2, 2]);
    for (entries, bad) in [(vec![1i32, -1, 0], false), (vec![1, 0, 7], true)] {
        let map = tensor(cuda, entries, &[3]);
        let mut out = Tensor::empty(cuda, DType::F32, &[3, 2]).expect("out");
        let call = GatherRows { source: source.view(), map: map.view(), out: out.view_mut() };
        cuda.gather_rows(call).expect("enqueued");
        match cuda.check() {
            Ok(()) => {
                assert!(!bad);
                assert_eq!(cuda.read(out.view()).expect("out"), [3.0, 4.0, 0.0, 0.0, 1.0, 2.0]);
            }
            Err(e) => assert!(bad && e.to_string().contains("map[2]"), "{e}"),
        }
        cuda.check().expect("told once");
    }
}

fn f64_is_refused(cuda: &Cuda) {
    let case = Case::new(moebius::MoeConfig::new(16, 8, 4, 2), 6, DType::F64);
    let error = on_gpu(&case, &Data::new(&case).expect("inputs"), cuda).err().map(|e| e.to_string());
    assert!(error.as_ref().is_some_and(|e| e.contains("on CUDA")), "{error:?}");
}

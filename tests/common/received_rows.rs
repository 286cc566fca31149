//! Rows that a dispatch brings to each rank, counted from the choices of all ranks' tokens.

use moebius::ep::DispatcherKind;

/// Rows that reach each rank: the tokens of all ranks that chose an expert of it, each once, or all tokens where all are
/// gathered; none where there is one rank. `ids`: of each rank `[T, K]`, none dropped; rank r has experts
/// `r·E/R..(r + 1)·E/R`.
pub fn received_rows(kind: DispatcherKind, ids: &[Vec<usize>], k: usize, experts: usize) -> Vec<usize> {
    let tokens = || ids.iter().flat_map(|ids| ids.chunks_exact(k));
    let local = experts / ids.len();
    let of = |rank: usize| match kind {
        _ if ids.len() == 1 => 0,
        DispatcherKind::AllGather => tokens().count(),
        _ => tokens().filter(|choices| choices.iter().any(|id| id / local == rank)).count(),
    };
    (0..ids.len()).map(of).collect()
}

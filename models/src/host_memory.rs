//! Whether the host has memory of a size that a caller has named: an allocation that fails would end the process.

/// Whether the host has so much memory for one tensor. What is had already does not count, and a system that promises more
/// than it has promises it here too.
pub(crate) fn has_host_memory(bytes: usize) -> bool {
    let mut room = Vec::<u8>::new();
    let reserved = room.try_reserve_exact(bytes).is_ok();
    // Unseen, the compiler takes memory that nobody uses for had, whatever its size.
    std::hint::black_box(&room);
    reserved
}

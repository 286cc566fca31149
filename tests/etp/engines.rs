//! Every body over communicators that have memory of their own for collectives, as copy engines want it.

use moebius::cpu::Cpu;

use super::{bodies, with_memory};

#[test]
fn every_body_with_memory_of_the_communicators() {
    for (file, _, name, run) in bodies::<Cpu>() {
        println!("{file}::{name}");
        with_memory(|| run(&Cpu::new()));
    }
}

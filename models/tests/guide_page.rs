//! The piece of a program on the page about the decoders stands here too, so that it compiles as it is shown.

/// Lines of the piece, without their margins.
fn piece(page: &str) -> Vec<&str> {
    let lines = page.lines().map(str::trim).skip_while(|line| *line != "```rust,ignore");
    lines.skip(1).take_while(|line| *line != "```").collect()
}

#[test]
fn the_piece_of_the_page_compiles() {
    // Read when the test runs: the guide is the repository's, and not in the package.
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/models.md")).unwrap();
    let own: Vec<&str> = include_str!("guide_page.rs").lines().map(str::trim).collect();
    let piece = piece(&page);
    assert!(piece.len() > 5, "{piece:?}");
    assert!(own.windows(piece.len()).any(|lines| lines == piece), "not in guide_page.rs:\n{}", piece.join("\n"));
    assert_eq!(page.matches("```rust").count(), 1, "pieces");
}

/// On the CPU, which every build has; a GPU's device and communicator take the same way.
#[allow(dead_code, reason = "shown, not run")]
#[rustfmt::skip]
mod from_a_program {
    use std::error::Error;

    use candle_core::{Device, Tensor};
    use moebius::candle::{DeviceGroup, EpGroup};
    use moebius::checkpoint::Checkpoint;
    use moebius::comm::Communicator;
    use moebius::cpu::Cpu;
    use moebius::ep::{Group, GroupConfig};
    use moebius_models::{LoadOptions, Model};

    struct Sizes { ranks: usize, n: usize, top_k: usize, experts: usize, longest_prefill: usize, own: usize, capacity: usize }

    fn decode(
        checkpoint: Checkpoint,
        (cuda, comm, device): (Cpu, Box<dyn Communicator<Cpu>>, Device),
        options: LoadOptions,
        Sizes { ranks, n, top_k, experts, longest_prefill, own, capacity }: Sizes,
        (prompts, tokens): (Tensor, usize),
    ) -> Result<(), Box<dyn Error>> {
        let config = GroupConfig { max_rows: ranks * n * top_k, forward_only: true, ..GroupConfig::new(experts, longest_prefill) };
        let model = Model::load_on(&checkpoint, DeviceGroup::new(EpGroup::new(Group::new(cuda, comm, config)?), &device)?, options)?;
        let mut stepper = model.stepper(own, capacity)?;  // own: this rank's sequences, at most n
        stepper.feed(&prompts)?;
        stepper.capture_over_ranks(n)?;                   // on all ranks, ahead of the same step
        for _token in 0..tokens {
            stepper.step()?;                              // all ranks as often
        }
        Ok(())
    }
}

//! Where a weight's gather and its reduce-scatter stand.

use crate::error::{Error, Result};

/// State of a weight's gather, or of its gradient's reduce-scatter; each weight has one of each.
///
/// ```text
/// None → AsyncWait → DataReady → None     started ahead of its use
/// None → DataReadySync → None             done when it was asked for
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CollectiveState {
    /// Nothing under way, no memory held.
    #[default]
    None,
    /// A collective is under way.
    AsyncWait,
    /// A collective that was started ahead has brought its data, which are in use.
    DataReady,
    /// A collective that nobody had started ahead has brought its data, which are in use.
    DataReadySync,
}

/// A [`CollectiveState`] that moves along its edges only.
#[derive(Debug, Default)]
pub(in crate::etp) struct StateMachine(CollectiveState);

impl StateMachine {
    pub fn state(&self) -> CollectiveState {
        self.0
    }

    /// Moves on; in every build, as the check costs nothing beside a collective.
    pub fn transition(&mut self, to: CollectiveState, weight: &str) -> Result<()> {
        use CollectiveState::*;
        match (self.0, to) {
            (None, AsyncWait) | (AsyncWait, DataReady) | (DataReady, None) | (None, DataReadySync) => {}
            (DataReadySync, None) => {}
            (from, to) => {
                return Err(Error::WeightState {
                    call: "etp",
                    weight: weight.to_string(),
                    expected: format!("a state that leads to {to:?}"),
                    found: format!("{from:?}"),
                });
            }
        }
        self.0 = to;
        Ok(())
    }

    /// Back to the start, from anywhere: what was under way is given up.
    pub fn reset(&mut self) {
        self.0 = CollectiveState::None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_five_edges_are_allowed() {
        use CollectiveState::*;
        let all = [None, AsyncWait, DataReady, DataReadySync];
        let edges = [
            (None, AsyncWait),
            (AsyncWait, DataReady),
            (DataReady, None),
            (None, DataReadySync),
            (DataReadySync, None),
        ];
        for from in all {
            for to in all {
                let mut machine = StateMachine(from);
                let moved = machine.transition(to, "w");
                assert_eq!(moved.is_ok(), edges.contains(&(from, to)), "{from:?} to {to:?}");
                assert_eq!(machine.state(), if moved.is_ok() { to } else { from });
            }
        }
    }
}

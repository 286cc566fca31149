//! A value for each parameter of a layer: the one place that lists them by field.

use std::ops::{Index, IndexMut};

use super::param_kind::ParamKind;

/// A value for each parameter that a layer may have. Those that a configuration lacks are `None` in a
/// `PerParam<Option<T>>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PerParam<T> {
    /// Of [`ParamKind::Router`].
    pub router: T,
    /// Of [`ParamKind::RouterBias`].
    pub router_bias: T,
    /// Of [`ParamKind::SelectionBias`].
    pub selection_bias: T,
    /// Of [`ParamKind::Up`].
    pub up: T,
    /// Of [`ParamKind::UpBias`].
    pub up_bias: T,
    /// Of [`ParamKind::Down`].
    pub down: T,
    /// Of [`ParamKind::DownBias`].
    pub down_bias: T,
    /// Of [`ParamKind::SharedUp`].
    pub shared_up: T,
    /// Of [`ParamKind::SharedUpBias`].
    pub shared_up_bias: T,
    /// Of [`ParamKind::SharedDown`].
    pub shared_down: T,
    /// Of [`ParamKind::SharedDownBias`].
    pub shared_down_bias: T,
    /// Of [`ParamKind::SharedGate`].
    pub shared_gate: T,
}

impl<T> PerParam<T> {
    /// Asks for each value, in the order of [`ParamKind::ALL`].
    pub fn from_fn(value: impl FnMut(ParamKind) -> T) -> Self {
        Self::from_array(ParamKind::ALL.map(value))
    }

    /// The same of values that can fail.
    ///
    /// # Errors
    /// The first that `value` returns.
    pub fn try_from_fn<E>(mut value: impl FnMut(ParamKind) -> Result<T, E>) -> Result<Self, E> {
        PerParam::<()>::default().try_map(|kind, ()| value(kind))
    }

    /// Another value made of each.
    pub fn map<U>(self, mut value: impl FnMut(ParamKind, T) -> U) -> PerParam<U> {
        let mut kinds = ParamKind::ALL.into_iter();
        PerParam::from_array(self.into_array().map(|t| match kinds.next() {
            Some(kind) => value(kind, t),
            None => unreachable!("as many kinds as values"),
        }))
    }

    /// The same of values that can fail.
    ///
    /// # Errors
    /// The first that `value` returns.
    pub fn try_map<U, E>(self, mut value: impl FnMut(ParamKind, T) -> Result<U, E>) -> Result<PerParam<U>, E> {
        let mut failed = None;
        let values = self.map(|kind, t| match failed {
            Some(_) => None,
            None => value(kind, t).map_err(|error| failed = Some(error)).ok(),
        });
        match (failed, values.complete()) {
            (Some(error), _) => Err(error),
            (None, Some(values)) => Ok(values),
            (None, None) => unreachable!("a value is missing only where one failed"),
        }
    }

    /// The values borrowed.
    pub fn as_ref(&self) -> PerParam<&T> {
        PerParam {
            router: &self.router,
            router_bias: &self.router_bias,
            selection_bias: &self.selection_bias,
            up: &self.up,
            up_bias: &self.up_bias,
            down: &self.down,
            down_bias: &self.down_bias,
            shared_up: &self.shared_up,
            shared_up_bias: &self.shared_up_bias,
            shared_down: &self.shared_down,
            shared_down_bias: &self.shared_down_bias,
            shared_gate: &self.shared_gate,
        }
    }

    /// The values borrowed, to be changed.
    pub fn as_mut(&mut self) -> PerParam<&mut T> {
        PerParam {
            router: &mut self.router,
            router_bias: &mut self.router_bias,
            selection_bias: &mut self.selection_bias,
            up: &mut self.up,
            up_bias: &mut self.up_bias,
            down: &mut self.down,
            down_bias: &mut self.down_bias,
            shared_up: &mut self.shared_up,
            shared_up_bias: &mut self.shared_up_bias,
            shared_down: &mut self.shared_down,
            shared_down_bias: &mut self.shared_down_bias,
            shared_gate: &mut self.shared_gate,
        }
    }

    /// The values in the order of [`ParamKind::ALL`].
    fn into_array(self) -> [T; ParamKind::ALL.len()] {
        let Self {
            router,
            router_bias,
            selection_bias,
            up,
            up_bias,
            down,
            down_bias,
            shared_up,
            shared_up_bias,
            shared_down,
            shared_down_bias,
            shared_gate,
        } = self;
        [
            router,
            router_bias,
            selection_bias,
            up,
            up_bias,
            down,
            down_bias,
            shared_up,
            shared_up_bias,
            shared_down,
            shared_down_bias,
            shared_gate,
        ]
    }

    fn from_array(values: [T; ParamKind::ALL.len()]) -> Self {
        let [
            router,
            router_bias,
            selection_bias,
            up,
            up_bias,
            down,
            down_bias,
            shared_up,
            shared_up_bias,
            shared_down,
            shared_down_bias,
            shared_gate,
        ] = values;
        Self {
            router,
            router_bias,
            selection_bias,
            up,
            up_bias,
            down,
            down_bias,
            shared_up,
            shared_up_bias,
            shared_down,
            shared_down_bias,
            shared_gate,
        }
    }
}

/// Each parameter with its value, in the order of [`ParamKind::ALL`].
impl<T> IntoIterator for PerParam<T> {
    type Item = (ParamKind, T);
    type IntoIter = std::iter::Zip<std::array::IntoIter<ParamKind, 12>, std::array::IntoIter<T, 12>>;

    fn into_iter(self) -> Self::IntoIter {
        ParamKind::ALL.into_iter().zip(self.into_array())
    }
}

impl<T> Index<ParamKind> for PerParam<T> {
    type Output = T;

    fn index(&self, kind: ParamKind) -> &T {
        self.as_ref().into_array()[kind as usize]
    }
}

impl<T> IndexMut<ParamKind> for PerParam<T> {
    fn index_mut(&mut self, kind: ParamKind) -> &mut T {
        match kind {
            ParamKind::Router => &mut self.router,
            ParamKind::RouterBias => &mut self.router_bias,
            ParamKind::SelectionBias => &mut self.selection_bias,
            ParamKind::Up => &mut self.up,
            ParamKind::UpBias => &mut self.up_bias,
            ParamKind::Down => &mut self.down,
            ParamKind::DownBias => &mut self.down_bias,
            ParamKind::SharedUp => &mut self.shared_up,
            ParamKind::SharedUpBias => &mut self.shared_up_bias,
            ParamKind::SharedDown => &mut self.shared_down,
            ParamKind::SharedDownBias => &mut self.shared_down_bias,
            ParamKind::SharedGate => &mut self.shared_gate,
        }
    }
}

impl<T> PerParam<Option<T>> {
    /// No values.
    pub fn none() -> Self {
        Self::from_fn(|_| None)
    }

    /// A parameter's value, if there is one.
    pub fn get(&self, kind: ParamKind) -> Option<&T> {
        self[kind].as_ref()
    }

    /// The values that there are, with their parameters.
    pub fn present(&self) -> impl Iterator<Item = (ParamKind, &T)> {
        self.as_ref().into_iter().filter_map(|(kind, t)| Some((kind, t.as_ref()?)))
    }

    /// [`present`](Self::present), by value.
    pub fn into_present(self) -> impl Iterator<Item = (ParamKind, T)> {
        self.into_iter().filter_map(|(kind, t)| Some((kind, t?)))
    }

    /// The values, if none is missing.
    fn complete(self) -> Option<PerParam<T>> {
        let values: Vec<T> = self.into_array().into_iter().flatten().collect();
        values.try_into().ok().map(PerParam::from_array)
    }
}

impl<T> FromIterator<(ParamKind, T)> for PerParam<Option<T>> {
    fn from_iter<I: IntoIterator<Item = (ParamKind, T)>>(values: I) -> Self {
        let mut all = Self::none();
        values.into_iter().for_each(|(kind, t)| all[kind] = Some(t));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_value_is_found_under_its_parameter() {
        let mut names = PerParam::from_fn(|kind| kind.name());
        assert_eq!(
            (names.router, names.up_bias, names.shared_gate),
            ("router.weight", "experts.up_bias", "shared.gate")
        );
        for kind in ParamKind::ALL {
            assert_eq!(names[kind], kind.name());
            assert_eq!(*names.as_mut().map(|_, name| name)[kind], kind.name());
            names[kind] = "";
        }
        assert!(names.into_iter().all(|(_, name)| name.is_empty()));
        let places: Vec<_> = PerParam::from_fn(|kind| kind as usize).into_iter().collect();
        assert!(places.iter().enumerate().all(|(i, (kind, place))| *kind == ParamKind::ALL[i] && *place == i));
    }

    #[test]
    fn the_first_failure_is_told_and_nothing_is_asked_after_it() {
        let mut asked = 0;
        let failed = PerParam::try_from_fn(|kind| {
            asked += 1;
            if kind == ParamKind::Up || kind == ParamKind::Down { Err(kind) } else { Ok(kind) }
        });
        assert_eq!((failed, asked), (Err(ParamKind::Up), 4));
    }

    #[test]
    fn what_a_configuration_lacks_is_skipped() {
        let some: PerParam<Option<u8>> = [(ParamKind::Down, 2), (ParamKind::Router, 1)].into_iter().collect();
        assert_eq!(some.present().collect::<Vec<_>>(), [(ParamKind::Router, &1), (ParamKind::Down, &2)]);
        assert_eq!(some.get(ParamKind::Up), None);
        assert_eq!(some.into_present().count(), 2);
    }
}

//! Values that a device computes, read when somebody asks.

use std::fmt;
use std::sync::{Arc, OnceLock};

use crate::error::Result;

/// A value that a device computes. Reading it waits for the device, once; not reading it costs nothing.
pub struct Lazy<T>(Arc<LazyState<T>>);

struct LazyState<T> {
    value: OnceLock<T>,
    #[allow(clippy::type_complexity)]
    read: Option<Box<dyn Fn() -> Result<T> + Send + Sync>>,
}

impl<T> Lazy<T> {
    /// A value that is there already.
    pub fn ready(value: T) -> Self {
        Self(Arc::new(LazyState { value: OnceLock::from(value), read: None }))
    }

    /// A value that `read` will fetch.
    pub(crate) fn from_fn(read: impl Fn() -> Result<T> + Send + Sync + 'static) -> Self {
        Self(Arc::new(LazyState { value: OnceLock::new(), read: Some(Box::new(read)) }))
    }

    /// The value, if that takes no waiting.
    pub fn known(&self) -> Option<&T> {
        self.0.value.get()
    }

    /// The value.
    ///
    /// # Errors
    /// Errors that an earlier call left to be reported by the device; a driver's error.
    pub fn get(&self) -> Result<&T> {
        match (self.0.value.get(), &self.0.read) {
            (None, Some(read)) => {
                let value = read()?;
                Ok(self.0.value.get_or_init(|| value))
            }
            (Some(value), _) => Ok(value),
            (None, None) => Err(crate::Error::invalid("Lazy::get", "value", "one, or a way to read it", "neither")),
        }
    }
}

impl<T> Clone for Lazy<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T: fmt::Debug> fmt::Debug for Lazy<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.value.get() {
            Some(value) => value.fmt(f),
            None => f.write_str("(not read yet)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_value_is_read_once_and_only_if_asked_for() -> Result<()> {
        let reads = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&reads);
        let lazy = Lazy::from_fn(move || Ok(counter.fetch_add(1, Ordering::Relaxed)));
        let other = lazy.clone();
        assert_eq!(reads.load(Ordering::Relaxed), 0);
        assert_eq!((*lazy.get()?, *other.get()?), (0, 0));
        assert_eq!(reads.load(Ordering::Relaxed), 1);
        assert_eq!(*Lazy::ready(7).get()?, 7);
        Ok(())
    }

    #[test]
    fn a_failed_read_is_tried_again() {
        let calls = AtomicUsize::new(0);
        let lazy = Lazy::from_fn(move || match calls.fetch_add(1, Ordering::Relaxed) {
            0 => Err(crate::Error::invalid("test", "value", "a second try", "the first")),
            n => Ok(n),
        });
        assert!(lazy.get().is_err());
        assert_eq!(lazy.get().ok(), Some(&1));
    }
}

//! The secret that the ranks of one job share.

use std::fmt;
use std::fs::File;
use std::io::Read;

use crate::error::RankError;
use crate::error::{Error, Result};

pub(super) const TOKEN_BYTES: usize = 32;
const VARIABLE: &str = "MOEBIUS_TOKEN";

/// A job's secret: 32 random bytes, 64 hexadecimal digits as text. `Debug` does not show it.
///
/// Compared in constant time, by [`JobToken::matches`] alone: there is deliberately no `==`.
#[derive(Clone)]
pub struct JobToken([u8; TOKEN_BYTES]);

impl fmt::Debug for JobToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobToken(..)")
    }
}

impl JobToken {
    /// A new one, from the operating system's generator.
    ///
    /// # Errors
    /// [`Error::Device`]: this system has no `/dev/urandom`.
    pub fn random() -> Result<Self> {
        let mut bytes = [0; TOKEN_BYTES];
        File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)).map_err(|error| Error::Device {
            call: "ranks::JobToken::random",
            operation: "read /dev/urandom".to_string(),
            message: error.to_string(),
        })?;
        Ok(Self(bytes))
    }

    /// The one in `MOEBIUS_TOKEN`.
    ///
    /// # Errors
    /// [`RankError::Variable`]: not set, or not 64 hexadecimal digits. The value is not repeated.
    pub fn from_env() -> Result<Self> {
        let found = match std::env::var_os(VARIABLE) {
            None => "nothing".to_string(),
            Some(text) => match text.to_str().and_then(|text| Self::parse(text).ok()) {
                Some(token) => return Ok(token),
                None => format!("{} bytes that are not", text.len()),
            },
        };
        let expected = "64 hexadecimal digits, the same on every rank (moebius-run --print-token makes them)";
        Err(RankError::Variable { variable: VARIABLE, expected: expected.to_string(), found }.into())
    }

    /// From 64 hexadecimal digits.
    ///
    /// # Errors
    /// [`Error::Invalid`], without the text: it may be nearly a secret.
    pub fn parse(hex: &str) -> Result<Self> {
        let digits: Vec<u8> = hex.chars().map_while(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
        if digits.len() != 2 * TOKEN_BYTES || hex.len() != digits.len() {
            let found = format!("{} bytes, {} digits at their start", hex.len(), digits.len());
            return Err(Error::invalid("ranks::JobToken::parse", "token", "64 hexadecimal digits", found));
        }
        let mut bytes = [0; TOKEN_BYTES];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = pair[0] << 4 | pair[1];
        }
        Ok(Self(bytes))
    }

    /// As 64 lower-case hexadecimal digits, for a child's environment. Not for a command line: those are public.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Whether both are the same, in a time that does not tell where they differ.
    pub fn matches(&self, other: &JobToken) -> bool {
        // Kept opaque, or the compiler may leave the loop at the first difference.
        let differing = self.0.iter().zip(&other.0).fold(0u8, |sum, (a, b)| std::hint::black_box(sum | (a ^ b)));
        std::hint::black_box(differing) == 0
    }

    pub(super) fn from_bytes(bytes: [u8; TOKEN_BYTES]) -> Self {
        Self(bytes)
    }

    pub(super) fn bytes(&self) -> &[u8; TOKEN_BYTES] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_counts() {
        let token = JobToken::random().unwrap();
        assert!(token.matches(&JobToken::parse(&token.to_hex()).unwrap()));
        assert!(token.matches(&JobToken::parse(&token.to_hex().to_uppercase()).unwrap()));
        for bit in 0..8 * TOKEN_BYTES {
            let mut other = token.clone();
            other.0[bit / 8] ^= 1 << (bit % 8);
            assert!(!token.matches(&other) && !other.matches(&token), "bit {bit}");
        }
        assert!(!token.matches(&JobToken::random().unwrap()));
    }

    #[test]
    fn text_is_checked_and_not_repeated() {
        let good = "0123456789abcdef".repeat(4);
        assert_eq!(JobToken::parse(&good).unwrap().to_hex(), good);
        for bad in ["", "12", &good[1..], &format!("{good}0"), &format!("{}g", &good[1..]), &format!("{}é", &good[2..])]
        {
            let error = JobToken::parse(bad).unwrap_err().to_string();
            assert!(error.contains("64 hexadecimal digits"), "{error}");
            assert!(!error.contains("abcdef"), "{error}");
        }
        assert_eq!(format!("{:?}", JobToken::parse(&good).unwrap()), "JobToken(..)");
    }
}

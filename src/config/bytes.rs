//! A number of bytes, written `8GiB`, `512 MiB`, `2.5GB` or as a plain number.

use serde::de::{Deserialize, Deserializer, Error, Visitor};
use std::fmt;
use std::str::FromStr;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

/// `B` is last, because it is a suffix of all the others.
const UNITS: [(&str, u64); 7] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("B", 1),
];

/// The text is not a number of bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is not a number of bytes such as 8GiB, 512MiB, 2.5GB or 1048576")]
pub struct ParseBytesError(String);

impl FromStr for Bytes {
    type Err = ParseBytesError;

    fn from_str(text: &str) -> Result<Bytes, ParseBytesError> {
        let wrong = || ParseBytesError(text.to_owned());
        let trimmed = text.trim();
        let (number, unit) =
            UNITS.iter().find_map(|(name, unit)| Some((trimmed.strip_suffix(name)?, *unit))).unwrap_or((trimmed, 1));
        let number = number.trim();
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(unit).map(Bytes).ok_or_else(wrong);
        }
        let plain = number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
        let number: f64 = number.parse().ok().filter(|_| plain).ok_or_else(wrong)?;
        let bytes = number * unit as f64;
        if bytes.is_finite() && bytes < u64::MAX as f64 { Ok(Bytes(bytes as u64)) } else { Err(wrong()) }
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("GiB", 1u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
        let Some((name, unit)) = units.into_iter().find(|(_, unit)| self.0 >= *unit) else {
            return write!(f, "{} B", self.0);
        };
        write!(f, "{:.1} {name}", self.0 as f64 / unit as f64)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
        struct Read;
        impl Visitor<'_> for Read {
            type Value = Bytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of bytes such as \"8GiB\" or 1048576")
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<Bytes, E> {
                Ok(Bytes(value))
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<Bytes, E> {
                let unexpected = serde::de::Unexpected::Signed(value);
                u64::try_from(value).map(Bytes).map_err(|_| E::invalid_value(unexpected, &self))
            }

            fn visit_str<E: Error>(self, value: &str) -> Result<Bytes, E> {
                let unexpected = serde::de::Unexpected::Str(value);
                value.parse().map_err(|_| E::invalid_value(unexpected, &self))
            }
        }
        deserializer.deserialize_any(Read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_fractions_and_plain_numbers_are_read() {
        for (text, bytes) in [
            ("0", 0),
            ("1048576", 1 << 20),
            ("17 B", 17),
            ("8GiB", 8 << 30),
            ("512 MiB", 512 << 20),
            ("3KiB", 3 << 10),
            ("2.5GB", 2_500_000_000),
            (" 4MB ", 4_000_000),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused() {
        for text in ["", "GiB", "-1", "1e3", "inf", "NaN", "8 gigs", "8TiB", "99999999999GiB"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }

    #[test]
    fn shown_in_the_largest_unit_that_fits() {
        assert_eq!(Bytes(1023).to_string(), "1023 B");
        assert_eq!(Bytes(1536).to_string(), "1.5 KiB");
        assert_eq!(Bytes(8 << 30).to_string(), "8.0 GiB");
    }
}

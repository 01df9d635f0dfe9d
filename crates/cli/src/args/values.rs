//! Values that flags of several commands take.

use bench::Durability;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use node::Size;
use reactor::{DriverKind, PollMode};

/// How an idle core waits.
pub fn poll_mode() -> impl TypedValueParser<Value = PollMode> {
    PossibleValuesParser::new(["always", "adaptive", "never"]).try_map(|text| text.parse())
}

/// What an acknowledged write survives.
pub fn durability() -> impl TypedValueParser<Value = Durability> {
    PossibleValuesParser::new(["process", "power"]).try_map(|text| text.parse())
}

/// How to access disk and network.
pub fn driver() -> impl TypedValueParser<Value = DriverKind> {
    PossibleValuesParser::new(["auto", "io_uring", "epoll"]).try_map(|text| text.parse())
}

/// A rate in bytes per second.
pub fn rate(text: &str) -> Result<Size, String> {
    match text.parse::<Size>()? {
        Size(0) => Err("it must be above 0".to_owned()),
        rate => Ok(rate),
    }
}

/// Cores, in hundredths; 0 for `none`.
pub fn cores(text: &str) -> Result<u32, String> {
    match text.parse::<f64>() {
        _ if text == "none" => Ok(0),
        Ok(cores) if (0.01..=1024.0).contains(&cores) => Ok((cores * 100.0).round() as u32),
        _ => Err("cores must be a number from 0.01 to 1024, or none".to_owned()),
    }
}

/// Bytes for each live byte.
pub fn space_ratio(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(ratio) if (1.1..=1000.0).contains(&ratio) => Ok(ratio),
        _ => Err("the ratio must be a number from 1.1 to 1000".to_owned()),
    }
}

/// A duration in seconds.
pub fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= 86_400.0 => Ok(seconds),
        _ => Err("seconds must be a number above 0, at most 86400".to_owned()),
    }
}

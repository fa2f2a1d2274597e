//! Stub.
use super::Profile;

/// Stub.
#[must_use]
pub fn explain(_old: &Profile, _new: &Profile, _difference_us: f64) -> Option<String> {
    None
}

//! Rotary embeddings: default, linear, llama3 and YaRN, as transformers 5.17 computes them (`modeling_rope_utils.py`).
//!
//! transformers computes the frequencies in float32; here they are computed in float64 and rounded once.

use std::f64::consts::PI;

use serde_json::Value;

use super::architecture::RopeDefaults;
use super::fields::{Fields, ModelError};
use crate::backend::Rope;

/// The fields of `rope_parameters` and `rope_scaling` that are read.
pub(super) const ROPE_FIELDS: &[&str] = &[
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
];

/// The rotary embedding of a configuration in either dialect; `default` where it gives none.
pub(super) fn rope(
    config: Fields<'_>,
    default: RopeDefaults,
    head_dim: usize,
    max_positions: usize,
) -> Result<Rope, ModelError> {
    let (scaling, parameters) = (config.object("rope_scaling")?, config.object("rope_parameters")?);
    let (prefix, map) = match (scaling, parameters) {
        (Some(map), _) => ("rope_scaling.", map),
        (None, Some(map)) => ("rope_parameters.", map),
        (None, None) => ("rope_parameters.", &default.parameters),
    };
    let fields = Fields { model: config.model, prefix, map };
    if let Some((layer_type, _)) = map.iter().find(|(_, value)| value.is_object()) {
        return Err(fields.error(layer_type, "supported is one set of parameters for all layers"));
    }
    for fields in [fields, config] {
        if fields.positive("partial_rotary_factor", Some(1.0))? != 1.0 {
            return Err(fields.error("partial_rotary_factor", "supported is 1"));
        }
    }
    let theta = [Some(map), parameters, Some(config.map)].into_iter().flatten();
    let theta = theta.map(|map| Fields { map, ..fields }).find(|fields| fields.get("rope_theta").is_some());
    let theta = theta.map_or(Ok(default.theta), |fields| fields.positive("rope_theta", None))?;
    // Frequency i turns by base^(-2i / dim) a position.
    let base: Vec<f64> = (0..head_dim / 2).map(|i| theta.powf(-2.0 * i as f64 / head_dim as f64)).collect();
    let original = || -> Result<f64, ModelError> {
        let outer = config.get("original_max_position_embeddings").map(|_| config);
        let original = outer.unwrap_or(fields);
        original.positive("original_max_position_embeddings", Some(max_positions as f64))
    };
    let kind = fields.text("rope_type")?.or(fields.text("type")?).unwrap_or("default");
    let (inv_freq, factor) = match kind {
        "default" => (base, 1.0),
        "linear" => {
            let factor = fields.positive("factor", None)?;
            (base.iter().map(|f| f / factor).collect(), 1.0)
        }
        "llama3" => (llama3(fields, &base, original()?)?, 1.0),
        "yarn" => yarn(fields, &base, theta, original()?, max_positions as f64)?,
        _ => {
            let field = if fields.has("rope_type") { "rope_type" } else { "type" };
            return Err(fields.error(field, "supported are default, linear, llama3 and yarn"));
        }
    };
    Ok(Rope { inv_freq: inv_freq.iter().map(|&f| f as f32).collect(), factor: factor as f32 })
}

/// Llama 3.1: long wavelengths are slowed down by `factor`, short ones kept, those between interpolated.
fn llama3(fields: Fields<'_>, base: &[f64], original: f64) -> Result<Vec<f64>, ModelError> {
    let factor = fields.positive("factor", None)?;
    let low = fields.positive("low_freq_factor", None)?;
    let high = fields.positive("high_freq_factor", None)?;
    if high == low {
        return Err(fields.error("high_freq_factor", "it must differ from low_freq_factor"));
    }
    Ok(base
        .iter()
        .map(|&frequency| {
            let wavelength = 2.0 * PI / frequency;
            if wavelength > original / low {
                frequency / factor
            } else if wavelength < original / high {
                frequency
            } else {
                let smooth = (original / wavelength - low) / (high - low);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            }
        })
        .collect())
}

/// YaRN (Peng et al. 2023): a ramp over the frequencies between interpolated and kept, and a factor on cosine and sine.
fn yarn(
    fields: Fields<'_>,
    base: &[f64],
    theta: f64,
    original: f64,
    max_positions: f64,
) -> Result<(Vec<f64>, f64), ModelError> {
    let factor = fields.positive("factor", Some(max_positions / original))?;
    let given = |field: &str| -> Result<Option<f64>, ModelError> {
        // Zero counts as not given, as in Python.
        if fields.get(field).and_then(Value::as_f64) == Some(0.0) {
            return Ok(None);
        }
        fields.get(field).map(|_| fields.positive(field, None)).transpose()
    };
    let scale = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    let attention_factor = match (given("attention_factor")?, given("mscale")?, given("mscale_all_dim")?) {
        (Some(attention_factor), ..) => attention_factor,
        (None, Some(mscale), Some(all_dim)) => scale(mscale) / scale(all_dim),
        _ => scale(1.0),
    };
    if theta == 1.0 {
        return Err(fields.error("rope_theta", "YaRN needs another than 1"));
    }
    let dim = 2.0 * base.len() as f64;
    let turning = |rotations: f64| dim * (original / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln());
    let (mut low, mut high) =
        (turning(given("beta_fast")?.unwrap_or(32.0)), turning(given("beta_slow")?.unwrap_or(1.0)));
    if fields.flag("truncate", true)? {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(dim - 1.0));
    if low == high {
        high += 0.001;
    }
    let frequencies = base.iter().enumerate().map(|(i, frequency)| {
        let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        frequency / factor * ramp + frequency * (1.0 - ramp)
    });
    Ok((frequencies.collect(), attention_factor))
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::*;

    /// Frequencies 0, 7, 15, 20, 25 and 31 of 32, and the factor, as transformers 5.17 computes them in float32.
    const REFERENCE: [(usize, &str, f32, [f32; 6]); 5] = [
        (
            131_072,
            r#"{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
            "original_max_position_embeddings": 8192}"#,
            1.0,
            [1.0, 0.056_669_62, 0.001_371_893_7, 3.428_102_4e-5, 4.411_534_5e-6, 3.767_322_6e-7],
        ),
        (
            131_072,
            r#"{"rope_type": "yarn", "rope_theta": 1.5e5, "factor": 32, "original_max_position_embeddings": 4096,
            "truncate": false, "beta_fast": 32.0, "beta_slow": 1.0}"#,
            1.346_573_6,
            [1.0, 0.073_744_565, 0.001_052_602_2, 1.818_833_7e-5, 2.825_066_8e-6, 3.023_511_4e-7],
        ),
        (
            163_840,
            r#"{"rope_type": "yarn", "rope_theta": 1e4, "factor": 40, "original_max_position_embeddings": 4096,
            "mscale": 0.707, "mscale_all_dim": 1.0, "beta_fast": 16}"#,
            0.921_042_4,
            [1.0, 0.133_352_15, 0.009_789_261, 0.000_919_935_3, 1.874_735_4e-5, 3.333_803_5e-6],
        ),
        (
            163_840,
            r#"{"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "attention_factor": 1.25}"#,
            1.25,
            [1.0, 0.133_352_15, 0.008_334_509, 0.000_790_569_4, 1.874_735_4e-5, 3.333_803_5e-6],
        ),
        (
            4096,
            r#"{"rope_type": "linear", "rope_theta": 1e4, "factor": 4}"#,
            1.0,
            [0.25, 0.033_338_036, 0.003_333_803_7, 0.000_790_569_5, 0.000_187_473_55, 3.333_803_8e-5],
        ),
    ];

    #[test]
    fn frequencies_are_those_of_transformers() {
        for (max_positions, json, factor, frequencies) in REFERENCE {
            let value: Value = serde_json::from_str(&format!("{{\"rope_parameters\": {json}}}")).unwrap();
            let map = value.as_object().unwrap();
            let default = RopeDefaults { theta: 1e4, parameters: Map::new() };
            let rope = rope(Fields { model: "m", prefix: "", map }, default, 64, max_positions).unwrap();
            assert!((rope.factor / factor - 1.0).abs() < 1e-6, "{json}: {}", rope.factor);
            for (i, expected) in [0, 7, 15, 20, 25, 31].into_iter().zip(frequencies) {
                let found = rope.inv_freq[i];
                assert!((found / expected - 1.0).abs() < 2e-6, "{json} [{i}]: {found}, not {expected}");
            }
        }
    }
}

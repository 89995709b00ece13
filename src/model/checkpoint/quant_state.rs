//! Reads the state that bitsandbytes stores beside a weight of 4 bits: a tensor with the bytes of a JSON object, and one
//! with the numbers of the type.
//!
//! Not here: the weight's other tensors.

use serde_json::Value;

use super::CheckpointProblem;
use super::place::TensorPlace;
use crate::quant::safetensors::NestedStorage;
use crate::quant::table::TableType;

/// The maximum size of a state in bytes; those of bitsandbytes have up to 200.
const MOST_BYTES: u64 = 64 << 10;
/// The largest block; a larger number means that the state is damaged.
const MOST_BLOCK: u64 = 1 << 24;

/// The state of a weight.
#[derive(Debug, PartialEq)]
pub(super) struct QuantState {
    /// The numbers of the codes.
    pub(super) table: TableType,
    /// The elements of a block.
    pub(super) block: u32,
    /// The rows and columns.
    pub(super) shape: [u64; 2],
    /// How scales are read that are quantised themselves.
    pub(super) nested: Option<NestedStorage>,
}

/// Returns the part of the name of the tensor with the state of a type.
fn state_part(table: TableType) -> &'static str {
    match table {
        TableType::Nf4 => "weight.quant_state.bitsandbytes__nf4",
        TableType::Fp4 => "weight.quant_state.bitsandbytes__fp4",
    }
}

/// The names of the tensors of one module and their places.
pub(super) struct ModuleTensors<'a> {
    /// Returns the name that a part of the module has.
    pub(super) name: &'a dyn Fn(&str) -> String,
    /// Returns the name in the file and the place of a part of the module, if the files have it.
    pub(super) find: &'a dyn Fn(&str) -> Option<(String, TensorPlace)>,
}

impl ModuleTensors<'_> {
    /// Returns the type of the state that stands beside the module's weight.
    pub(super) fn state(&self) -> Option<TableType> {
        TableType::ALL.into_iter().find(|table| (self.find)(state_part(*table)).is_some())
    }

    /// Reads the state of the module's weight, and checks that the type's numbers are those of the file.
    pub(super) fn read(&self) -> Result<QuantState, CheckpointProblem> {
        let missing = || {
            let names = TableType::ALL.map(|table| (self.name)(state_part(table)));
            CheckpointProblem::MissingTensor { tensor: names.join(" or ") }
        };
        let table = self.state().ok_or_else(missing)?;
        let (tensor, place) = (self.find)(state_part(table)).ok_or_else(missing)?;
        let wrong = |tensor: &str, reason: String| CheckpointProblem::QuantState { tensor: tensor.to_owned(), reason };
        if place.bytes > MOST_BYTES {
            return Err(wrong(&tensor, format!("it has {} bytes, must have at most {MOST_BYTES}", place.bytes)));
        }
        let value = serde_json::from_slice(&place.read()?).map_err(|error| wrong(&tensor, error.to_string()))?;
        let state = parse(&value, table).map_err(|reason| wrong(&tensor, reason))?;
        if let Some((tensor, place)) = (self.find)("weight.quant_map") {
            if place.bytes != 64 {
                return Err(wrong(&tensor, format!("it has {} bytes, must have 64", place.bytes)));
            }
            let bytes = place.read()?;
            let found = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
            let mut pairs = found.zip(table.numbers()).enumerate();
            let differ = |found: f32, wanted: f32| found.is_nan() || (found - wanted).abs() > 1e-5;
            if let Some((code, (found, wanted))) = pairs.find(|(_, (found, wanted))| differ(*found, **wanted)) {
                let name = table.name();
                return Err(wrong(&tensor, format!("code {code} is {found}, must be {wanted} as {name} has it")));
            }
        }
        Ok(state)
    }
}

/// Reads the object.
fn parse(value: &Value, table: TableType) -> Result<QuantState, String> {
    let number = |key: &str| value.get(key).and_then(Value::as_u64);
    let shown = |key: &str| value.get(key).map_or_else(|| "absent".to_owned(), Value::to_string);
    let only = |key: &str, known: &str| match value.get(key) {
        Some(found) if found.as_str() != Some(known) => Err(format!("{key} is {found}, must be \"{known}\"")),
        _ => Ok(()),
    };
    let block = |key: &str, least: u64| match number(key) {
        Some(block) if block > 0 && block.is_multiple_of(least) && block <= MOST_BLOCK => Ok(block as u32),
        _ => Err(format!("{key} is {}, must be a multiple of {least} of at most {MOST_BLOCK}", shown(key))),
    };
    only("quant_type", table.name())?;
    let sizes: Option<Vec<u64>> =
        value.get("shape").and_then(Value::as_array).and_then(|shape| shape.iter().map(Value::as_u64).collect());
    let Some(&[rows, cols]) = sizes.as_deref() else {
        return Err(format!("shape is {}, must be two sizes", shown("shape")));
    };
    let nested = match value.get("nested_blocksize").or(value.get("nested_offset")) {
        None => None,
        Some(_) => {
            only("nested_dtype", "float32")?;
            let Some(offset) = value.get("nested_offset").and_then(Value::as_f64) else {
                return Err(format!("nested_offset is {}, must be a number", shown("nested_offset")));
            };
            Some(NestedStorage { block: block("nested_blocksize", 1)?, offset_bits: (offset as f32).to_bits() })
        }
    };
    Ok(QuantState { table, block: block("blocksize", 16)?, shape: [rows, cols], nested })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_state_says_how_a_weight_is_stored() {
        let plain = json!({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [96, 128]});
        let read = parse(&plain, TableType::Nf4).unwrap();
        let wanted = QuantState { table: TableType::Nf4, block: 64, shape: [96, 128], nested: None };
        assert_eq!(read, wanted);
        let mut nested = plain;
        for (key, value) in [("nested_blocksize", json!(256)), ("nested_dtype", json!("float32"))] {
            nested[key] = value;
        }
        nested["nested_offset"] = json!(0.03125);
        let storage = NestedStorage { block: 256, offset_bits: 0.03125f32.to_bits() };
        assert_eq!(parse(&nested, TableType::Nf4), Ok(QuantState { nested: Some(storage), ..wanted }));
    }

    #[test]
    fn what_a_state_must_not_say_is_named() {
        let refused = |key: &str, value: Value, expected: &str| {
            let mut state = json!({
                "quant_type": "fp4", "blocksize": 64, "dtype": "float16", "shape": [96, 128], "nested_blocksize": 256,
                "nested_dtype": "float32", "nested_offset": 0.5,
            });
            parse(&state, TableType::Fp4).unwrap();
            state[key] = value;
            assert_eq!(parse(&state, TableType::Fp4).unwrap_err(), expected);
        };
        refused("quant_type", json!("nf4"), "quant_type is \"nf4\", must be \"fp4\"");
        refused("blocksize", json!(40), "blocksize is 40, must be a multiple of 16 of at most 16777216");
        refused("blocksize", json!(0), "blocksize is 0, must be a multiple of 16 of at most 16777216");
        refused("shape", json!([96]), "shape is [96], must be two sizes");
        refused("nested_blocksize", json!(0), "nested_blocksize is 0, must be a multiple of 1 of at most 16777216");
        refused("nested_offset", json!("0"), "nested_offset is \"0\", must be a number");
        refused("nested_dtype", json!("float16"), "nested_dtype is \"float16\", must be \"float32\"");
    }
}

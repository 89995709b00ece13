//! The comparison of two values of a choice: which one's steps are faster, and whether their logits are the same but for
//! rounding. Pure.
//! Not here: running steps (`bench`).

/// The number of steps that time each of two values when they are compared.
pub(super) const DUELLED: usize = 21;
/// The maximum difference between a candidate's logits and those of the default choices, relative to their norm.
pub(super) const ROUNDING: f64 = 2e-3;
/// The same between products with and without activations that are rounded to f16.
pub(super) const ROUNDING_OF_ROWS: f64 = 1e-2;
/// The minimum gain, as a fraction of the step time, for which an entry is written.
const LEAST_GAIN: f64 = 1e-3;

/// The logits of each row of a step.
pub(super) type Logits = Vec<Vec<f32>>;

pub(super) fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

/// Returns whether a candidate that was timed alternately with the incumbent is faster by more than the variation
/// between repetitions.
pub(super) fn faster(incumbent: &[f64], candidate: &[f64]) -> bool {
    let spread = |times: &[f64]| {
        let middle = median(times);
        median(&times.iter().map(|time| (time - middle).abs()).collect::<Vec<f64>>())
    };
    let gain = median(incumbent) - median(candidate);
    let noise = spread(incumbent).max(spread(candidate)).max(LEAST_GAIN * median(incumbent));
    let wins = incumbent.iter().zip(candidate).filter(|(old, new)| new < old).count();
    gain > noise && wins * 4 >= incumbent.len() * 3
}

/// Returns `Ok` if the logits of all rows equal the reference except for rounding, which makes a difference of at most
/// `most` of their norm; otherwise describes the difference.
pub(super) fn same(reference: &Logits, logits: &Logits, most: f64) -> Result<(), String> {
    match (&reference[..], &logits[..]) {
        ([reference], [logits]) => same_row(reference, logits, most, 0.0),
        // Of many rows, one may have two tokens that are almost equally likely.
        _ => (0..).zip(reference.iter().zip(logits)).try_for_each(|(row, (reference, logits))| {
            same_row(reference, logits, most, most).map_err(|what| format!("row {row}: {what}"))
        }),
    }
}

/// Compares the logits of a row. Its best token may be another one if the reference's logits of both differ by at most
/// `tie` of their root mean square.
fn same_row(reference: &[f32], logits: &[f32], most: f64, tie: f64) -> Result<(), String> {
    let best = |of: &[f32]| of.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(token, _)| token);
    let square = |value: f64| value * value;
    let norm: f64 = reference.iter().map(|a| square(f64::from(*a))).sum();
    let apart: f64 = reference.iter().zip(logits).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    let difference = (apart / norm).sqrt();
    if difference.is_nan() || difference > most {
        return Err(format!("its logits differ by {difference:.1e} of their norm, at most {most:.1e} is rounding"));
    }
    let near = |a: usize, b: usize| {
        let gap = f64::from(reference[a]) - f64::from(reference[b]);
        gap <= tie * (norm / reference.len() as f64).sqrt()
    };
    match (best(reference), best(logits)) {
        (Some(wanted), Some(found)) if wanted != found && !near(wanted, found) => {
            Err(format!("its token is {found}, the rules' is {wanted}"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_stands_out_of_the_noise_is_faster() {
        let noisy: Vec<f64> = (0..21).map(|i| 100.0 + f64::from(i % 5)).collect();
        let scaled = |by: f64| -> Vec<f64> { noisy.iter().map(|time| time * by).collect() };
        assert!(faster(&noisy, &scaled(0.9)));
        assert!(!faster(&noisy, &noisy) && !faster(&noisy, &scaled(1.1)));
        // A gain smaller than the variation of the times.
        assert!(!faster(&noisy, &scaled(0.995)));
        // A better median, but too many lost rounds.
        let lucky: Vec<f64> = (0..21).map(|i| if i % 2 == 0 { 90.0 } else { 200.0 }).collect();
        assert!(!faster(&[100.0; 21], &lucky));
    }

    #[test]
    fn logits_are_the_same_but_for_rounding() {
        let of = |row: &[f32]| vec![row.to_vec()];
        let reference: Vec<f32> = (0..100).map(|i| (i as f32 * 0.7).sin()).collect();
        let scaled: Vec<f32> = reference.iter().map(|value| value * 1.001).collect();
        assert_eq!(same(&of(&reference), &of(&scaled), ROUNDING), Ok(()));
        let mut wrong = reference.clone();
        wrong[3] += 0.1;
        assert!(same(&of(&reference), &of(&wrong), ROUNDING).is_err_and(|what| what.contains("of their norm")));
        wrong[3] = f32::NAN;
        assert!(same(&of(&reference), &of(&wrong), ROUNDING).is_err());
        assert!(
            same(&of(&[1.0, 1.0001, 0.0]), &of(&[1.0001, 1.0, 0.0]), ROUNDING)
                .is_err_and(|what| what.contains("its token is 0"))
        );
    }

    #[test]
    fn each_row_of_a_batch_is_compared_and_may_be_a_tie() {
        let right = vec![1.0, 1.0001, 0.0];
        let batch = |row: &[f32]| vec![right.clone(), row.to_vec()];
        assert_eq!(same(&batch(&right), &batch(&[1.0001, 1.0, 0.0]), ROUNDING), Ok(()));
        let apart = same(&batch(&right), &batch(&[1.0, 0.9, 0.0]), ROUNDING);
        assert!(apart.is_err_and(|what| what.starts_with("row 1: its logits differ")));
        // Many logits hide a difference of the best one in the norm, but not the other token.
        let mut long = vec![1.0f32; 4_000_000];
        (long[0], long[1]) = (3.0, 2.0);
        let mut other = long.clone();
        (other[0], other[1]) = (2.0, 3.0);
        let other = same(&vec![long.clone(), long.clone()], &vec![long, other], ROUNDING);
        assert!(other.is_err_and(|what| what == "row 1: its token is 1, the rules' is 0"));
    }
}

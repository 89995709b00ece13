//! The formula of attention scores and their variants, independent of the kernels' own references.

use ostinato::kernels::attention::Scores;

/// Returns the score of a query and a key whose product is `dot`.
pub fn scored(scores: Scores, dim: u32, dot: f64) -> f64 {
    let scaled = scores.scale.map_or(dot / f64::from(dim).sqrt(), |scale| dot * f64::from(scale));
    scores.soft_cap.map_or(scaled, |cap| f64::from(cap) * (scaled / f64::from(cap)).tanh())
}

/// Returns the first token that the token at `position` sees.
pub fn first_visible(scores: Scores, position: u32) -> u32 {
    scores.window.map_or(0, |window| (position + 1).saturating_sub(window))
}

/// Returns the last token that the token at `position` sees, if the last row of its prompt in the step is at `end`.
pub fn last_visible(scores: Scores, position: u32, end: u32) -> u32 {
    match (scores.both, scores.window) {
        (false, _) => position,
        (true, None) => end,
        (true, Some(window)) => end.min(position + window - 1),
    }
}

/// Returns a query head's sink: some take most of the softmax, others hardly anything.
pub fn sink_of(head: u32) -> f32 {
    [0.5, 3.0, -2.0, 6.0][head as usize % 4]
}

/// Returns the factor of the query at a position.
pub fn query_scale(position: u32) -> f32 {
    1.0 + (position % 5) as f32 * 0.25
}

/// Returns variants of the scores: all together; a window that is shorter than a page, with sinks; a window that is longer
/// than several blocks.
pub fn variants() -> [Scores; 3] {
    [
        Scores {
            scale: Some(0.21),
            window: Some(20),
            both: false,
            soft_cap: Some(3.5),
            sinks: true,
            query_scales: None,
        },
        Scores { window: Some(7), sinks: true, ..Scores::default() },
        Scores { window: Some(130), ..Scores::default() },
    ]
}

/// Returns variants in which tokens see later ones: all of them; up to a window that is shorter than a page, with sinks; up
/// to a window that is longer than a page, together with the rest.
pub fn variants_of_both_sides() -> [Scores; 3] {
    let both = |scores: Scores| Scores { both: true, ..scores };
    [both(Scores::default()), both(variants()[1]), both(variants()[0])]
}

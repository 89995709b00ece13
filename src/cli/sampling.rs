//! The arguments that say how tokens are drawn, which `generate` and `chat` share. They are checked with the engine's
//! own rules before a model is loaded or a server is asked.

use crate::engine::request::{Bounds, Limits, Sampling};
use crate::replica::SubmitError;
use crate::service::proto;
use crate::service::refusal::Refusal;

/// Arguments that say how tokens are drawn.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct SamplingArgs {
    /// Maximum number of output tokens. Default: as many as fit in the context.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    max_tokens: Option<u32>,
    /// Sampling temperature; 0 always takes the most probable token. Default: 0, in a chat 0.7.
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Sample only from the K most probable tokens.
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    top_k: Option<u32>,
    /// Sample only from the smallest set of tokens whose probabilities add up to at least P. Default: 1, in a chat
    /// 0.95.
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Drop tokens whose probability is below P times that of the most probable token.
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Penalty on tokens that occur in the prompt or the output; 1 has no effect.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repetition_penalty: Option<f32>,
    /// Penalty on tokens that occur in the output; 0 has no effect.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    presence_penalty: Option<f32>,
    /// Penalty on tokens for each of their occurrences in the output; 0 has no effect.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,
    /// Add X to the logit of token ID. Can be repeated.
    #[arg(long, value_name = "ID=X", value_parser = bias)]
    logit_bias: Vec<(u32, f32)>,
    /// Seed of the sampling; the same seed gives the same text.
    #[arg(long, value_name = "S", value_parser = seed, allow_negative_numbers = true)]
    seed: Option<u64>,
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let pair = text.split_once('=').and_then(|(id, x)| Some((id.parse().ok()?, x.parse().ok()?)));
    pair.ok_or_else(|| format!("\"{text}\" is not ID=NUMBER"))
}

fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("{text} is not a whole number from 0 to {}", u64::MAX))
}

impl SamplingArgs {
    /// Whether there are token ids, which only a model's vocabulary allows or refuses.
    pub(super) fn names_ids(&self) -> bool {
        !self.logit_bias.is_empty()
    }

    /// Returns the same arguments with a chat's defaults: greedy answers of chat models tend to repeat themselves.
    pub(super) fn of_chat(&self) -> SamplingArgs {
        SamplingArgs { temperature: self.temperature.or(Some(0.7)), top_p: self.top_p.or(Some(0.95)), ..self.clone() }
    }

    /// Returns the message's `sampling`.
    pub(super) fn message(&self) -> proto::Sampling {
        proto::Sampling {
            temperature: Some(self.temperature.unwrap_or(0.0)),
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed,
            logit_bias: self.logit_bias.iter().copied().collect(),
            n: None,
        }
    }

    /// Returns the message's `stopping`, with the maximum number of tokens alone.
    pub(super) fn stopping(&self) -> proto::Stopping {
        proto::Stopping { max_tokens: self.max_tokens, ..proto::Stopping::default() }
    }

    /// Refuses values that no model takes, in the words of the engine. Values that a model's size decides are left to
    /// it.
    pub(super) fn check(&self) -> Result<(), Refusal> {
        let any = Bounds { vocabulary: u32::MAX, context: u32::MAX, eos_ids: Vec::new(), draws: true };
        self.check_for(Limits::default(), &any)
    }

    /// Refuses values that a model with these bounds does not take; `limits` are those without the maximum number of
    /// tokens.
    pub(super) fn check_for(&self, limits: Limits, bounds: &Bounds) -> Result<(), Refusal> {
        let defaults = Sampling::default();
        let sampling = Sampling {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(defaults.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            seed: self.seed,
            logit_bias: self.logit_bias.clone(),
        };
        let limits = Limits { max_tokens: self.max_tokens, ..limits };
        let checked = sampling.validate(bounds.vocabulary).and_then(|()| limits.validate(bounds));
        checked.map_err(|error| SubmitError::Request(error).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::refusal::status;

    #[test]
    fn values_that_no_model_takes_are_named_with_the_rule() {
        let none = SamplingArgs::default;
        for (args, words) in [
            (SamplingArgs { temperature: Some(-1.0), ..none() }, "temperature is -1, must be finite and at least 0"),
            (SamplingArgs { temperature: Some(f32::NAN), ..none() }, "temperature is NaN"),
            (SamplingArgs { top_p: Some(2.0), ..none() }, "top_p is 2, must be above 0 and at most 1"),
            (SamplingArgs { max_tokens: Some(0), ..none() }, "max_tokens is 0, must be at least 1"),
            (SamplingArgs { logit_bias: vec![(1, 0.5), (1, 0.6)], ..none() }, "logit_bias is 1, must be given once"),
        ] {
            let error = args.check().expect_err(words);
            assert!(error.to_string().contains(words), "{error}");
            assert_eq!(status(&error).code(), tonic::Code::InvalidArgument, "{error}");
        }
        assert!(none().of_chat().check().is_ok());
    }

    #[test]
    fn a_chat_has_its_own_defaults_and_keeps_what_is_given() {
        let chat = SamplingArgs::default().of_chat().message();
        assert_eq!((chat.temperature, chat.top_p), (Some(0.7), Some(0.95)));
        let given = SamplingArgs { temperature: Some(0.0), top_p: Some(1.0), ..SamplingArgs::default() };
        let chat = given.of_chat().message();
        assert_eq!((chat.temperature, chat.top_p), (Some(0.0), Some(1.0)));
        assert_eq!(SamplingArgs::default().message().temperature, Some(0.0));
    }
}

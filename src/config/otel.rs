//! The standard `OTEL_*` environment variables, as far as they concern the export of spans over OTLP/gRPC. They come
//! after the file and before `OSTINATO_*`: a variable of this program for the same setting takes precedence.
//! Not here: the export (`telemetry`). The exporter itself reads the headers, which may contain secrets; here they are
//! only checked.

use super::Telemetry;
use super::load::Problem;
use http::{HeaderName, HeaderValue};
use percent_encoding::percent_decode_str;
use std::time::Duration;

/// The variables that are read. `docs/configuration.md` explains each. Those with `OTLP` in their name also exist with
/// `OTLP_TRACES` in its place, which takes precedence.
pub const OTEL_VARIABLES: [&str; 11] = [
    "OTEL_SDK_DISABLED",
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_INSECURE",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    "OTEL_EXPORTER_OTLP_HEADERS",
    "OTEL_EXPORTER_OTLP_TIMEOUT",
    "OTEL_SERVICE_NAME",
    "OTEL_RESOURCE_ATTRIBUTES",
    "OTEL_TRACES_SAMPLER",
    "OTEL_TRACES_SAMPLER_ARG",
];

/// The longest timeout of an export, in milliseconds.
const MAX_TIMEOUT_MS: u64 = 600_000;

/// The settings of the export that only `OTEL_*` variables have.
#[derive(Clone, Debug, PartialEq)]
pub struct OtelSettings {
    /// Whether the decision in a client's `traceparent` takes precedence over `telemetry.sample_ratio`; by default it
    /// does.
    pub parent_based: bool,
    /// Attributes of the resource, such as `service.name`. A later one of the same name takes precedence.
    pub resource: Vec<(String, String)>,
    /// The timeout of one export; by default the exporter's.
    pub timeout: Option<Duration>,
}

impl Default for OtelSettings {
    fn default() -> OtelSettings {
        OtelSettings { parent_based: true, resource: Vec::new(), timeout: None }
    }
}

/// Applies the variables to settings that come from the file and from `OSTINATO_*`, and returns the problems of those
/// that matter: if no spans are exported, only the ones that decide about that do. `ours` tells whether `OSTINATO_*`
/// has a key, such as `telemetry.sample_ratio`; `variable` returns the value of a variable.
pub(super) fn apply(
    telemetry: &mut Telemetry,
    ours: impl Fn(&str) -> bool,
    variable: impl Fn(&str) -> Option<String>,
) -> Vec<Problem> {
    // An empty variable is one that is not set.
    let value = |name: &str| variable(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
    // The name is that of the variable that was found.
    let export = |name: &str| {
        ["OTEL_EXPORTER_OTLP_TRACES_", "OTEL_EXPORTER_OTLP_"].into_iter().find_map(|prefix| {
            let name = format!("{prefix}{name}");
            value(&name).map(|value| (name, value))
        })
    };
    let is_true = |value: &str| value.eq_ignore_ascii_case("true");
    let mut problems = Vec::new();
    if !ours("telemetry.otlp_endpoint") {
        let exporter = value("OTEL_TRACES_EXPORTER");
        let disabled = value("OTEL_SDK_DISABLED").is_some_and(|value| is_true(&value));
        if disabled || exporter.as_deref() == Some("none") {
            telemetry.otlp_endpoint = None;
        } else if let Some((name, endpoint)) = export("ENDPOINT") {
            let insecure = export("INSECURE").is_some_and(|(_, value)| is_true(&value));
            let address = match endpoint.contains("://") || !insecure {
                true => endpoint.clone(),
                false => format!("http://{endpoint}"),
            };
            if Telemetry::is_endpoint(&address) {
                telemetry.otlp_endpoint = Some(address);
            } else {
                let rule = "must be an http:// address such as http://127.0.0.1:4317 (or, with \
                            OTEL_EXPORTER_OTLP_INSECURE=true, 127.0.0.1:4317); TLS is not supported";
                problems.push(Problem::new(name, rule, endpoint));
            }
        }
        if telemetry.otlp_endpoint.is_some()
            && let Some(other) = exporter.filter(|exporter| exporter != "otlp")
        {
            problems.push(Problem::new("OTEL_TRACES_EXPORTER", "must be otlp or none", other));
        }
    }
    if telemetry.otlp_endpoint.is_none() {
        return problems;
    }
    if let Some((name, protocol)) = export("PROTOCOL").filter(|(_, protocol)| protocol != "grpc") {
        problems.push(Problem::new(name, "must be grpc", protocol));
    }
    if let Some((name, headers)) = export("HEADERS") {
        problems.extend(pairs(&headers).zip(1..).filter(|(pair, _)| !pair.is_some_and(is_header)).map(
            |(_, number)| {
                // Without the value, which may be a secret.
                let rule = format!("must be NAME=VALUE pairs separated by commas, and pair {number} is not one");
                Problem { key: name.clone(), rule, value: None, source: None }
            },
        ));
    }
    if let Some((name, timeout)) = export("TIMEOUT") {
        match timeout.parse().ok().filter(|ms| (1..=MAX_TIMEOUT_MS).contains(ms)) {
            Some(ms) => telemetry.otel.timeout = Some(Duration::from_millis(ms)),
            None => problems.push(Problem::new(name, "must be between 1 and 600000 milliseconds", timeout)),
        }
    }
    if let Some(attributes) = value("OTEL_RESOURCE_ATTRIBUTES") {
        for pair in pairs(&attributes) {
            match pair.and_then(|(key, text)| Some((key, percent_decode_str(text).decode_utf8().ok()?))) {
                Some((key, text)) => telemetry.otel.resource.push((key.to_owned(), text.into_owned())),
                None => {
                    let rule = "must be KEY=VALUE pairs separated by commas, with other commas, percent signs and \
                                equals signs written as %2C, %25 and %3D";
                    problems.push(Problem::new("OTEL_RESOURCE_ATTRIBUTES", rule, &attributes));
                    break;
                }
            }
        }
    }
    if let Some(name) = value("OTEL_SERVICE_NAME") {
        telemetry.otel.resource.push(("service.name".to_owned(), name));
    }
    if let Some(sampler) = value("OTEL_TRACES_SAMPLER").filter(|_| !ours("telemetry.sample_ratio")) {
        let root = sampler.strip_prefix("parentbased_");
        telemetry.otel.parent_based = root.is_some();
        match root.unwrap_or(&sampler) {
            "always_on" => telemetry.sample_ratio = 1.0,
            "always_off" => telemetry.sample_ratio = 0.0,
            "traceidratio" => {
                let argument = value("OTEL_TRACES_SAMPLER_ARG").unwrap_or_else(|| "1".to_owned());
                match argument.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio)) {
                    Some(ratio) => telemetry.sample_ratio = ratio,
                    None => problems.push(Problem::new("OTEL_TRACES_SAMPLER_ARG", "must be between 0 and 1", argument)),
                }
            }
            _ => {
                let rule = "must be always_on, always_off or traceidratio, or one of these after parentbased_";
                problems.push(Problem::new("OTEL_TRACES_SAMPLER", rule, sampler));
            }
        }
    }
    problems
}

/// Splits `KEY=VALUE,KEY=VALUE`. `None` stands for a part without a key or an equals sign. Empty parts are left out.
fn pairs(text: &str) -> impl Iterator<Item = Option<(&str, &str)>> {
    text.split(',').map(str::trim).filter(|part| !part.is_empty()).map(|part| {
        let (key, value) = part.split_once('=')?;
        Some((key.trim(), value.trim())).filter(|(key, _)| !key.is_empty())
    })
}

fn is_header((name, value): (&str, &str)) -> bool {
    let value = percent_decode_str(value).decode_utf8();
    name.parse::<HeaderName>().is_ok() && value.is_ok_and(|value| HeaderValue::from_str(&value).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(to: Telemetry, ours: &[&str], variables: &[(&str, &str)]) -> (Telemetry, Vec<String>) {
        let mut telemetry = to;
        let known = |name: &str| OTEL_VARIABLES.contains(&&*name.replace("OTLP_TRACES_", "OTLP_"));
        let problems = apply(
            &mut telemetry,
            |key| ours.contains(&key),
            |name| {
                assert!(known(name), "{name} is read and not listed");
                variables.iter().find(|(set, _)| *set == name).map(|(_, value)| (*value).to_owned())
            },
        );
        (telemetry, problems.iter().map(ToString::to_string).collect())
    }

    fn exported() -> Telemetry {
        Telemetry { otlp_endpoint: Some("http://file:4317".to_owned()), sample_ratio: 0.25, ..Telemetry::default() }
    }

    #[test]
    fn the_endpoint_is_that_of_the_most_specific_variable() {
        let endpoint = |ours: &[&str], variables: &[(&str, &str)]| {
            let (telemetry, problems) = applied(exported(), ours, variables);
            assert!(problems.is_empty(), "{problems:?}");
            telemetry.otlp_endpoint
        };
        let general = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://general:4317");
        let traces = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://traces:4317");
        let bare = ("OTEL_EXPORTER_OTLP_ENDPOINT", "bare:4317");
        let key = ["telemetry.otlp_endpoint"];
        for (ours, variables, wanted) in [
            (&[][..], &[][..], Some("http://file:4317")),
            (&[], &[general], Some("http://general:4317")),
            (&[], &[general, traces], Some("http://traces:4317")),
            (&[], &[("OTEL_EXPORTER_OTLP_ENDPOINT", " ")], Some("http://file:4317")),
            (&[], &[bare, ("OTEL_EXPORTER_OTLP_INSECURE", "True")], Some("http://bare:4317")),
            (&[], &[general, ("OTEL_TRACES_EXPORTER", "otlp")], Some("http://general:4317")),
            (&[], &[general, ("OTEL_TRACES_EXPORTER", "none")], None),
            (&[], &[general, ("OTEL_SDK_DISABLED", "true")], None),
            (&[], &[general, ("OTEL_SDK_DISABLED", "1")], Some("http://general:4317")),
            (&key, &[general, ("OTEL_SDK_DISABLED", "true"), bare], Some("http://file:4317")),
        ] {
            assert_eq!(endpoint(ours, variables).as_deref(), wanted, "{variables:?}");
        }
        // Alone, a variable is enough.
        let (telemetry, _) = applied(Telemetry::default(), &[], &[general]);
        assert_eq!(telemetry.otlp_endpoint.as_deref(), Some("http://general:4317"));
    }

    #[test]
    fn other_settings_of_the_export_are_taken_over() {
        let (telemetry, problems) = applied(
            exported(),
            &[],
            &[
                ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
                ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc"),
                ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20b,, Tenant = t"),
                ("OTEL_EXPORTER_OTLP_TIMEOUT", "1500"),
                ("OTEL_RESOURCE_ATTRIBUTES", "service.name=x, team = a%2Cb,empty="),
                ("OTEL_SERVICE_NAME", "llm"),
                ("OTEL_TRACES_SAMPLER", "traceidratio"),
                ("OTEL_TRACES_SAMPLER_ARG", "0.5"),
            ],
        );
        assert!(problems.is_empty(), "{problems:?}");
        let resource = [("service.name", "x"), ("team", "a,b"), ("empty", ""), ("service.name", "llm")];
        let resource = resource.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec();
        let timeout = Some(Duration::from_millis(1500));
        assert_eq!(telemetry.otel, OtelSettings { parent_based: false, resource, timeout });
        assert_eq!(telemetry.sample_ratio, 0.5);
    }

    #[test]
    fn samplers_are_a_ratio_and_whether_the_client_decides_first() {
        for (sampler, argument, wanted) in [
            ("always_on", "0.1", (false, 1.0)),
            ("always_off", "", (false, 0.0)),
            ("traceidratio", "", (false, 1.0)),
            ("parentbased_always_on", "", (true, 1.0)),
            ("parentbased_always_off", "", (true, 0.0)),
            ("parentbased_traceidratio", "0.125", (true, 0.125)),
            ("", "0.5", (true, 0.25)),
        ] {
            let variables = [("OTEL_TRACES_SAMPLER", sampler), ("OTEL_TRACES_SAMPLER_ARG", argument)];
            let (telemetry, problems) = applied(exported(), &[], &variables);
            assert!(problems.is_empty(), "{problems:?}");
            assert_eq!((telemetry.otel.parent_based, telemetry.sample_ratio), wanted, "{sampler}");
            // The program's own variable for the ratio takes precedence over the sampler as a whole.
            let (telemetry, _) = applied(exported(), &["telemetry.sample_ratio"], &variables);
            assert_eq!((telemetry.otel.parent_based, telemetry.sample_ratio), (true, 0.25), "{sampler}");
        }
    }

    #[test]
    fn a_variable_that_cannot_be_used_is_named_if_spans_are_exported() {
        for (name, value, wanted) in [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://c:4317", "TLS is not supported"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "c:4317", "must be an http:// address"),
            ("OTEL_TRACES_EXPORTER", "console", "must be otlp or none, is console"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", "must be grpc, is http/protobuf"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "a=b,secret", "pair 2 is not one"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "a b=secret", "pair 1 is not one"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "a=secret%0A", "pair 1 is not one"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "0", "between 1 and 600000 milliseconds, is 0"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s", "between 1 and 600000 milliseconds, is 10s"),
            ("OTEL_RESOURCE_ATTRIBUTES", "a=b,c", "KEY=VALUE pairs"),
            ("OTEL_RESOURCE_ATTRIBUTES", "a=%FF", "KEY=VALUE pairs"),
            ("OTEL_TRACES_SAMPLER", "jaeger_remote", "is jaeger_remote"),
        ] {
            let (_, problems) = applied(exported(), &[], &[(name, value)]);
            assert_eq!(problems.len(), 1, "{name}={value}: {problems:?}");
            assert!(problems[0].starts_with(name) && problems[0].contains(wanted), "{name}={value}: {problems:?}");
            assert!(!problems[0].contains("secret"), "{problems:?}");
            // The same variables are no concern of a server that exports nothing.
            let (telemetry, problems) = applied(Telemetry::default(), &[], &[(name, value)]);
            assert_eq!((telemetry, problems.len()), (Telemetry::default(), usize::from(name.ends_with("ENDPOINT"))));
        }
        let ratio = [("OTEL_TRACES_SAMPLER", "traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", "2")];
        let (_, problems) = applied(exported(), &[], &ratio);
        assert_eq!(problems, ["OTEL_TRACES_SAMPLER_ARG must be between 0 and 1, is 2"]);
    }
}

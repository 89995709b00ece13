//! Goal: the files in `deploy/` agree with the program and with each other. Every metric and label that a dashboard, an
//! alert or `docs/slow-request.md` queries is documented in `docs/metrics.md` (which `tests/service/metrics.rs` compares with
//! the program), every configuration key is accepted, ports and addresses are the defaults, images are pinned, and
//! mounted files exist. Method: the files are parsed, and those that another program reads are given to that program or
//! checked against its schema: the unit to `systemd-analyze`, objects to Kubernetes' schemas, the router's arguments to
//! the router (`deploy/setup.sh test` installs all three). No container is run.

use crate::python::python;
use ostinato::config::{Config, Model, Selector, Sources, from_sources};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use yaml_rust2::{Yaml, YamlEmitter, YamlLoader};

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy")
}

fn text(name: &str) -> String {
    let path = deploy().join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Returns the documents of a YAML file with merge keys (`<<`) resolved.
fn yaml(name: &str) -> Vec<Yaml> {
    let documents = YamlLoader::load_from_str(&text(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    documents.into_iter().map(merged).collect()
}

fn merged(yaml: Yaml) -> Yaml {
    match yaml {
        Yaml::Hash(hash) => {
            let key = Yaml::String("<<".to_owned());
            let mut all = yaml_rust2::yaml::Hash::new();
            if let Some(Yaml::Hash(base)) = hash.get(&key) {
                all.extend(base.clone().into_iter().map(|(key, value)| (key, merged(value))));
            }
            for (name, value) in hash.into_iter().filter(|(name, _)| *name != key) {
                all.insert(name, merged(value));
            }
            Yaml::Hash(all)
        }
        Yaml::Array(list) => Yaml::Array(list.into_iter().map(merged).collect()),
        other => other,
    }
}

fn one(name: &str) -> Yaml {
    let mut documents = yaml(name);
    assert_eq!(documents.len(), 1, "{name}");
    documents.remove(0)
}

fn list(yaml: &Yaml) -> &[Yaml] {
    yaml.as_vec().map_or(&[], Vec::as_slice)
}

fn entries(yaml: &Yaml) -> impl Iterator<Item = (&str, &Yaml)> {
    yaml.as_hash().into_iter().flatten().map(|(key, value)| (key.as_str().expect("keys are words"), value))
}

/// Appends every string below `yaml` together with its key, the innermost one.
fn strings<'a>(under: &'a str, yaml: &'a Yaml, found: &mut Vec<(&'a str, &'a str)>) {
    match yaml {
        Yaml::String(text) => found.push((under, text)),
        Yaml::Array(list) => list.iter().for_each(|value| strings(under, value, found)),
        Yaml::Hash(_) => entries(yaml).for_each(|(key, value)| strings(key, value, found)),
        _ => {}
    }
}

/// Returns the labels of each series that `docs/metrics.md` documents. A histogram has the three series `_bucket`,
/// `_sum` and `_count`.
fn documented() -> BTreeMap<String, BTreeSet<String>> {
    let page = include_str!("../../docs/metrics.md");
    let mut series = BTreeMap::new();
    for line in page.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let name = cells[0].trim_matches('`');
        let labels: BTreeSet<String> =
            cells[2].split(',').map(|label| label.trim().trim_matches('`').to_owned()).collect();
        if cells[1] == "histogram" {
            for (suffix, le) in [("_bucket", Some("le")), ("_sum", None), ("_count", None)] {
                let more = le.map(str::to_owned);
                series.insert(format!("{name}{suffix}"), labels.iter().cloned().chain(more).collect());
            }
        } else {
            series.insert(name.to_owned(), labels);
        }
    }
    // Prometheus itself adds this series: whether a scrape succeeded.
    series.insert("up".to_owned(), BTreeSet::new());
    assert!(series.len() > 45, "{series:?}");
    series
}

/// Keywords of PromQL, which are not metrics.
const WORDS: [&str; 12] =
    ["and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "bool", "offset", "inf"];
/// Labels that Prometheus adds to every series.
const ADDED: [&str; 2] = ["instance", "job"];

fn is_letter(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == ':'
}

/// Returns the metrics of a PromQL expression, each with the labels of its selector, and the labels of grouping and
/// matching clauses.
fn named(query: &str) -> (Vec<(String, Vec<String>)>, Vec<String>) {
    let (mut metrics, mut groups) = (Vec::<(String, Vec<String>)>::new(), Vec::new());
    let mut rest = query;
    let mut grouping = false;
    while let Some(c) = rest.chars().next() {
        if c == '{' || c == '(' && grouping {
            let end = rest.find(if c == '{' { '}' } else { ')' }).unwrap_or_else(|| panic!("open: {query}"));
            let names = rest[1..end].split(',').map(|part| part.split(['=', '!']).next().unwrap_or("").trim());
            let names = names.filter(|name| !name.is_empty()).map(str::to_owned);
            if c == '{' {
                metrics.last_mut().unwrap_or_else(|| panic!("labels of nothing: {query}")).1.extend(names);
            } else {
                groups.extend(names);
            }
            grouping = false;
            rest = &rest[end + 1..];
        } else if c == '[' {
            rest = &rest[rest.find(']').unwrap_or_else(|| panic!("open: {query}")) + 1..];
        } else if c.is_ascii_digit() {
            rest = rest.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || c == '.');
        } else if is_letter(c) {
            let end = rest.find(|c| !is_letter(c)).unwrap_or(rest.len());
            let (word, behind) = rest.split_at(end);
            rest = behind;
            if WORDS.contains(&word) {
                grouping = ["by", "without", "on", "ignoring", "group_left", "group_right"].contains(&word);
            } else if !behind.trim_start().starts_with('(') && !behind.trim_start().starts_with("by") {
                metrics.push((word.to_owned(), Vec::new()));
            }
        } else {
            rest = &rest[c.len_utf8()..];
        }
    }
    (metrics, groups)
}

/// Returns the problems of an expression: metrics and labels that are not documented. `shown` are the labels that a
/// legend or an annotation shows of its result.
fn problems(query: &str, shown: &[String], documented: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let (metrics, groups) = named(query);
    let mut problems = Vec::new();
    let mut labels: BTreeSet<&str> = ADDED.into();
    for (metric, with) in &metrics {
        let Some(known) = documented.get(metric) else {
            problems.push(format!("{metric} is not documented: {query}"));
            continue;
        };
        labels.extend(known.iter().map(String::as_str));
        let unknown = with.iter().filter(|label| !known.contains(*label) && !ADDED.contains(&label.as_str()));
        problems.extend(unknown.map(|label| format!("{metric} has no label {label}: {query}")));
    }
    if metrics.is_empty() {
        problems.push(format!("asks for nothing: {query}"));
    }
    let unknown = groups.iter().chain(shown).filter(|label| !labels.contains(label.as_str()));
    problems.extend(unknown.map(|label| format!("no metric has label {label}: {query}")));
    problems
}

/// Returns the labels that a legend or an annotation contains.
fn placeholders(text: &str) -> Vec<String> {
    let inside = text.split("{{").skip(1).filter_map(|part| part.split_once("}}")).map(|(inside, _)| inside.trim());
    let names = inside.filter(|inside| !inside.starts_with("$value"));
    names.map(|inside| inside.trim_start_matches("$labels.").to_owned()).collect()
}

#[test]
fn expressions_are_read_as_prometheus_reads_them() {
    let query =
        r#"histogram_quantile(0.95, sum by (model, le) (rate(a_b{x=~"y", z!="1"}[5m]))) > 2.5 and on(q) c:d == 0"#;
    let (metrics, groups) = named(query);
    let wanted = [("a_b", vec!["x", "z"]), ("c:d", vec![])];
    let wanted = wanted.map(|(name, labels)| (name.to_owned(), labels.into_iter().map(str::to_owned).collect()));
    assert_eq!(metrics, wanted);
    assert_eq!(groups, ["model", "le", "q"]);
    let documented = documented();
    for (query, shown, count) in [
        (r#"rate(ostinato_steps_total{phase="decode"}[5m])"#, "{{replica}}", 0),
        (r#"rate(ostinato_steps{phase="decode"}[5m])"#, "", 1),
        (r#"rate(ostinato_steps_total{reason="decode"}[5m])"#, "", 1),
        ("sum by (uuid) (ostinato_slots)", "", 1),
        ("ostinato_slots", "{{uuid}}", 1),
        ("ostinato_slots * on (replica) group_left (uuid) ostinato_memory_plan_bytes", "{{uuid}}", 0),
        ("ostinato_slots * on (replica) group_left (reason) ostinato_memory_plan_bytes", "", 1),
        ("gen_ai_server_request_duration_seconds", "", 1),
        ("1 + 1", "", 1),
    ] {
        let problems = problems(query, &placeholders(shown), &documented);
        assert_eq!(problems.len(), count, "{query}: {problems:?}");
    }
}

#[test]
fn alerts_ask_for_what_is_documented() {
    let documented = documented();
    let alerts = one("alerts.yaml");
    let rules: Vec<&Yaml> = list(&alerts["groups"]).iter().flat_map(|group| list(&group["rules"])).collect();
    let mut seen = BTreeSet::new();
    for rule in &rules {
        let name = rule["alert"].as_str().expect("a name");
        assert!(seen.insert(name), "{name} twice");
        let summary = rule["annotations"]["summary"].as_str().expect("a summary");
        let found = problems(rule["expr"].as_str().expect("an expression"), &placeholders(summary), &documented);
        assert!(found.is_empty(), "{name}: {found:?}");
        assert!(["critical", "warning"].contains(&rule["labels"]["severity"].as_str().expect("a severity")), "{name}");
    }
    // While a lost device is rebuilt, its replica is not up and its requests wait. That is no failure yet.
    let mut states = 0;
    for rule in &rules {
        let (name, expression) = (rule["alert"].as_str().unwrap(), rule["expr"].as_str().unwrap());
        let minutes = rule["for"].as_str().and_then(|time| time.strip_suffix('m')?.parse::<u32>().ok());
        let down =
            ["ostinato_replica_up == 0", "ostinato_device_up == 0"].iter().any(|state| expression.contains(state));
        if down && !expression.contains("ostinato_replica_closed == 1") {
            states += 1;
            assert!(minutes.is_some_and(|minutes| minutes >= 10), "{name} fires while a lost device is rebuilt");
        }
        if expression.contains("ostinato_requests_room == 0") {
            assert!(expression.contains("ostinato_replica_up == 1"), "{name}: there is no room while it is rebuilt");
        }
    }
    assert_eq!(states, 2, "a replica and a device");
    let expressions: String = rules.iter().filter_map(|rule| rule["expr"].as_str()).collect();
    for asked in [
        "ostinato_device_losses_total",
        "ostinato_replica_up",
        "ostinato_requests_room",
        "ostinato_device_up",
        "ostinato_fallbacks_total",
        "gen_ai_server_time_to_first_token_seconds_bucket",
    ] {
        assert!(expressions.contains(asked), "nobody is told of {asked}");
    }
}

#[test]
fn the_dashboard_asks_for_what_is_documented() {
    let documented = documented();
    let dashboard: serde_json::Value = serde_json::from_str(&text("grafana/ostinato.json")).expect("JSON");
    let sources = one("grafana/provisioning/datasources/datasources.yaml");
    let uids: BTreeSet<&str> =
        list(&sources["datasources"]).iter().filter_map(|source| source["uid"].as_str()).collect();
    let (mut ids, mut asked) = (BTreeSet::new(), String::new());
    let panels = dashboard["panels"].as_array().expect("panels");
    for panel in panels {
        let title = panel["title"].as_str().expect("a title");
        assert!(ids.insert(panel["id"].as_u64()), "the id of {title:?} twice");
        if panel["type"] == "row" {
            continue;
        }
        assert!(panel["description"].as_str().is_some_and(|text| text.len() > 10), "{title:?} explains nothing");
        assert!(uids.contains(panel["datasource"]["uid"].as_str().unwrap()), "{title:?}");
        let targets = panel["targets"].as_array().expect("targets");
        assert!(!targets.is_empty(), "{title:?}");
        for target in targets {
            let query = target["expr"].as_str().unwrap().replace("$__rate_interval", "5m");
            asked.push_str(&query);
            let found = problems(&query, &placeholders(target["legendFormat"].as_str().unwrap()), &documented);
            assert!(found.is_empty(), "{title:?}: {found:?}");
        }
    }
    // Panels must not overlap.
    let place =
        |panel: &serde_json::Value| ["x", "y", "w", "h"].map(|side| panel["gridPos"][side].as_u64().expect("a place"));
    for (index, panel) in panels.iter().enumerate() {
        let [x, y, w, h] = place(panel);
        assert!(x + w <= 24, "{}", panel["title"]);
        for other in &panels[..index] {
            let [ox, oy, ow, oh] = place(other);
            let apart = x + w <= ox || ox + ow <= x || y + h <= oy || oy + oh <= y;
            assert!(apart, "{} lies over {}", panel["title"], other["title"]);
        }
    }
    let variable = dashboard["templating"]["list"][0]["query"]["query"].as_str().expect("a variable");
    let inside = variable.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')')).expect(variable);
    let (metric, label) = inside.split_once(", ").expect(variable);
    assert!(documented[metric].contains(label), "{variable}");
    // Metrics that an operator needs first must have a panel.
    for name in [
        "gen_ai_server_time_to_first_token_seconds_bucket",
        "ostinato_tokens_total",
        "ostinato_requests_waiting",
        "ostinato_kv_pages_used",
        "ostinato_step_seconds_total",
        "ostinato_flushes_total",
        "ostinato_memory_plan_bytes",
        "ostinato_device_memory_used_bytes",
        "ostinato_fallbacks_total",
    ] {
        assert!(asked.contains(name), "no panel shows {name}");
    }
}

#[test]
fn the_walk_through_a_slow_request_asks_for_what_is_documented() {
    let documented = documented();
    let page = include_str!("../../docs/slow-request.md");
    let blocks: Vec<&str> = page.split("```promql\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert!(blocks.len() >= 4, "{} blocks of queries", blocks.len());
    for query in blocks.iter().flat_map(|block| block.split("\n\n")) {
        let query: String = query.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join(" ");
        let found = problems(&query, &[], &documented);
        assert!(found.is_empty(), "{found:?}");
    }
    // Spans and attributes named on the page must be declared in the code.
    let names = include_str!("../../src/telemetry/names.rs");
    for word in page.split('`').skip(1).step_by(2).filter(|word| word.starts_with("ostinato.")) {
        assert!(names.contains(&format!("\"{word}\"")), "{word} is no name of ours");
    }
}

fn container() -> Config {
    let sources = Sources { file: Some(deploy().join("container.toml")), ..Sources::default() };
    from_sources(&sources).unwrap_or_else(|e| panic!("{e}"))
}

/// Splits `HOST:PORT`, with or without a scheme, into host and port.
fn host_and_port(address: &str) -> (&str, u16) {
    let rest = address.split_once("://").map_or(address, |(_, rest)| rest);
    let (host, port) = rest.rsplit_once(':').unwrap_or_else(|| panic!("{address} has no port"));
    (host, port.parse().unwrap_or_else(|_| panic!("{address} has no port")))
}

#[test]
fn the_containers_configuration_is_accepted_and_ports_are_the_defaults() {
    let (config, default) = (container(), Config::default());
    let grpc = default.server.listen.port();
    let admin = default.admin.listen.expect("it is on").port();
    let http = default.http.listen.expect("it is on").port();
    assert_eq!((grpc, http, admin), (50051, 8000, 9464));
    assert_eq!(config.http.listen.map(|listen| (listen.ip().is_unspecified(), listen.port())), Some((true, http)));
    assert_eq!((config.server.listen.port(), config.admin.listen.map(|listen| listen.port())), (grpc, Some(admin)));
    assert!(config.server.listen.ip().is_unspecified() && config.admin.listen.unwrap().ip().is_unspecified());

    let compose = one("compose.yaml");
    let mut services = Vec::new();
    for (name, service) in entries(&compose["services"]).filter(|(name, _)| name.starts_with("ostinato")) {
        services.push(name);
        let ports: BTreeSet<&str> = list(&service["ports"]).iter().filter_map(Yaml::as_str).collect();
        let wanted = [grpc, http, admin].map(|port| format!("127.0.0.1:{port}:{port}"));
        assert_eq!(ports, wanted.iter().map(String::as_str).collect(), "{name} is reached from this machine only");
        assert_eq!(service["networks"]["default"]["aliases"][0].as_str(), Some("ostinato"), "{name}");
        let test = list(&service["healthcheck"]["test"]).last().and_then(Yaml::as_str).expect("a check");
        assert_eq!(test, format!("http://127.0.0.1:{admin}/healthz"));
        let grace = service["stop_grace_period"].as_str().and_then(|s| s.strip_suffix('s')?.parse::<f64>().ok());
        assert!(grace.expect("seconds") > config.server.drain_seconds, "{name} is killed while it drains");
        if let Some(model) = list(&service["command"]).last().and_then(Yaml::as_str) {
            let model: Model = model.parse().expect("NAME=DIR@DEVICE");
            assert_eq!((&model.name, &model.path), (&config.models[0].name, &config.models[0].path));
            assert_eq!(model.replicas[0].device, Some(Selector::Cpu));
        }
    }
    assert_eq!(services, ["ostinato-nvidia", "ostinato-dri", "ostinato-cpu"]);
    assert!(text("Dockerfile").lines().any(|line| line == format!("EXPOSE {grpc} {http} {admin}")));

    let scrape = &one("prometheus.yaml")["scrape_configs"][0];
    assert_eq!(scrape["dns_sd_configs"][0]["port"].as_i64(), Some(admin.into()));
    assert_eq!(scrape["dns_sd_configs"][0]["names"][0].as_str(), Some("ostinato"));
    assert_eq!(scrape["metrics_path"].as_str(), Some("/metrics"));
    assert_eq!(scrape["job_name"].as_str(), Some("ostinato"), "alerts ask for it");
    let collector = one("otel-collector.yaml");
    let receives = collector["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].as_str().expect("an endpoint");
    let (host, port) = host_and_port(config.telemetry.otlp_endpoint.as_deref().expect("traces go somewhere"));
    assert_eq!((host, port, host_and_port(receives).1), ("otel-collector", 4317, 4317));
    for key in ["receivers", "processors", "exporters"] {
        let used = list(&collector["service"]["pipelines"]["traces"][key]);
        assert!(!used.is_empty() && used.iter().all(|name| !collector[key][name.as_str().unwrap()].is_badvalue()));
    }
}

/// Returns whether a selector's labels are among those of a pod template. An empty selector selects nothing.
fn selects(selector: &Yaml, template: &Yaml) -> bool {
    let mut wanted = entries(selector).peekable();
    wanted.peek().is_some() && wanted.all(|(key, value)| template["metadata"]["labels"][key] == *value)
}

/// Returns the objects of a kind in `kubernetes.yaml` by name.
fn objects<'a>(all: &'a [Yaml], kind: &str) -> BTreeMap<&'a str, &'a Yaml> {
    let of = all.iter().filter(|object| object["kind"].as_str() == Some(kind));
    of.map(|object| (object["metadata"]["name"].as_str().expect("a name"), object)).collect()
}

#[test]
fn kubernetes_finds_every_port_and_file_that_it_names() {
    let all = yaml("kubernetes.yaml");
    let (deployments, services) = (objects(&all, "Deployment"), objects(&all, "Service"));
    let kustomization = one("kustomization.yaml");
    let mut files: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for map in list(&kustomization["configMapGenerator"]) {
        for file in list(&map["files"]).iter().filter_map(Yaml::as_str) {
            let (inside, path) = file.split_once('=').unwrap_or((file.rsplit('/').next().unwrap(), file));
            assert!(deploy().join(path).is_file(), "{path} is not there");
            files.entry(map["name"].as_str().expect("a name")).or_default().insert(inside);
        }
    }
    assert_eq!(deployments.keys().collect::<Vec<_>>(), services.keys().collect::<Vec<_>>());
    for (name, deployment) in &deployments {
        let template = &deployment["spec"]["template"];
        for selector in [&deployment["spec"]["selector"]["matchLabels"], &services[name]["spec"]["selector"]] {
            assert!(selects(selector, template), "{name}: {selector:?}");
        }
        let container = &template["spec"]["containers"][0];
        let ports = list(&container["ports"]).iter();
        let ports: BTreeMap<&str, i64> =
            ports.map(|port| (port["name"].as_str().unwrap(), port["containerPort"].as_i64().unwrap())).collect();
        for port in list(&services[name]["spec"]["ports"]) {
            let target = ports[port["targetPort"].as_str().expect("a name")];
            assert_eq!(port["port"].as_i64(), Some(target), "{name}");
        }
        let volumes: BTreeMap<&str, &Yaml> = list(&template["spec"]["volumes"])
            .iter()
            .map(|volume| (volume["name"].as_str().unwrap(), &volume["configMap"]["name"]))
            .collect();
        for mount in list(&container["volumeMounts"]) {
            let map = volumes[mount["name"].as_str().unwrap()];
            assert!(map.is_badvalue() || files.contains_key(map.as_str().unwrap()), "{name}: no config map {map:?}");
        }
    }
    let ostinato = &deployments["ostinato"]["spec"]["template"];
    let container = &ostinato["spec"]["containers"][0];
    let (config, admin) = (self::container(), "9464");
    assert_eq!(container["readinessProbe"]["grpc"]["port"].as_i64(), Some(config.server.listen.port().into()));
    for probe in ["startupProbe", "livenessProbe"] {
        assert_eq!(container[probe]["httpGet"]["path"].as_str(), Some("/healthz"), "{probe}");
        assert_eq!(container[probe]["httpGet"]["port"].as_str(), Some("admin"), "{probe}");
    }
    assert_eq!(ostinato["metadata"]["annotations"]["prometheus.io/port"].as_str(), Some(admin));
    let grace = ostinato["spec"]["terminationGracePeriodSeconds"].as_i64().expect("seconds");
    assert!(grace as f64 > config.server.drain_seconds);
    assert_eq!(container["resources"]["limits"]["nvidia.com/gpu"].as_i64(), Some(1));
    // Draining a node or a rolling update takes down at most one worker at a time.
    let budget = objects(&all, "PodDisruptionBudget")["ostinato"];
    assert!(selects(&budget["spec"]["selector"]["matchLabels"], ostinato));
    assert_eq!(budget["spec"]["maxUnavailable"].as_i64(), Some(1));
    let deployment = &deployments["ostinato"]["spec"];
    assert!(deployment["replicas"].as_i64() > Some(1));
    assert_eq!(deployment["strategy"]["rollingUpdate"]["maxSurge"].as_i64(), Some(0), "there is no GPU for one more");
    assert_eq!(services["ostinato"]["spec"]["clusterIP"].as_str(), Some("None"), "every pod is scraped");
    // The image's default command reads the mounted file.
    assert!(files["ostinato"].contains("ostinato.toml"));
    assert!(text("Dockerfile").contains(r#"CMD ["serve", "--config", "/etc/ostinato/ostinato.toml"]"#));
}

#[test]
fn images_are_pinned_and_the_same_everywhere() {
    let mut images: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for name in ["compose.yaml", "fleet.yaml", "kubernetes.yaml"] {
        for document in yaml(name) {
            let mut found = Vec::new();
            strings("", &document, &mut found);
            let of = found.into_iter().filter(|(key, _)| *key == "image").map(|(_, image)| image.to_owned());
            images.entry(name).or_default().extend(of);
        }
    }
    let composed: BTreeSet<String> = images["compose.yaml"].union(&images["fleet.yaml"]).cloned().collect();
    assert_eq!(composed, images["kubernetes.yaml"]);
    assert_eq!((images["compose.yaml"].len(), composed.len()), (5, 6), "{images:?}");
    let dockerfiles = text("Dockerfile") + &text("router.Dockerfile");
    let bases: Vec<&str> =
        dockerfiles.lines().filter_map(|line| line.strip_prefix("FROM ")?.split(' ').next()).collect();
    assert_eq!(bases.len(), 3);
    for image in composed.iter().map(String::as_str).chain(bases.iter().copied()) {
        let (_, tag) = image.rsplit_once(':').unwrap_or_else(|| panic!("{image} has no version"));
        let numbers = tag.trim_start_matches('v').split(['.', '-']).take_while(|part| part.parse::<u32>().is_ok());
        assert!(numbers.count() >= 2, "{image} is no pinned version");
    }
    let ours = format!("ostinato:{}", env!("CARGO_PKG_VERSION"));
    assert!(images["compose.yaml"].contains(&ours), "the image of {ours}");
    assert!(bases[0].starts_with(&format!("rust:{}", env!("CARGO_PKG_RUST_VERSION"))), "{bases:?}");
    // The router's version is the one that `tests/program/fleet.rs` runs.
    let tested = include_str!("../requirements.txt");
    let version = |of: &str| tested.lines().find_map(|line| line.strip_prefix(of)?.strip_prefix("==")).expect(of);
    for package in ["smg", "smg-grpc-proto"] {
        let pinned = format!(" {package}=={} ", version(package));
        assert!(text("router.Dockerfile").contains(&pinned), "router.Dockerfile has another{pinned}");
    }
    assert!(composed.contains(&format!("ostinato-router:{}", version("smg"))), "{composed:?}");
}

#[test]
fn what_compose_mounts_is_there_and_what_is_asked_answers() {
    let compose = one("compose.yaml");
    let services: BTreeMap<&str, &Yaml> = entries(&compose["services"]).collect();
    let mut mounts = 0;
    for (name, service) in &services {
        for volume in list(&service["volumes"]).iter().filter_map(Yaml::as_str) {
            let (source, _) = volume.split_once(':').expect("a place inside");
            if let Some(path) = source.strip_prefix("./") {
                mounts += 1;
                assert!(deploy().join(path).exists(), "{name} mounts {path}, which is not there");
            } else if !source.starts_with("${") {
                assert!(entries(&compose["volumes"]).any(|(volume, _)| volume == source), "{name}: no volume {source}");
            }
        }
    }
    assert!(mounts >= 8, "{mounts} files are mounted");
    // Host names in the configurations are services of the compose file, and the ports are those of the services of the
    // same name in the cluster.
    let all = yaml("kubernetes.yaml");
    let cluster = objects(&all, "Service");
    let sources = one("grafana/provisioning/datasources/datasources.yaml");
    let urls = list(&sources["datasources"]).iter().map(|source| source["url"].as_str().expect("an address"));
    let collector = one("otel-collector.yaml");
    let exporter = collector["exporters"]["otlp/jaeger"]["endpoint"].as_str().expect("an address");
    for (host, port) in urls.chain([exporter]).map(host_and_port) {
        assert!(services.contains_key(host), "compose has no {host}");
        let ports = list(&cluster[host]["spec"]["ports"]);
        assert!(ports.iter().any(|of| of["port"].as_i64() == Some(port.into())), "{host} has no port {port}");
    }
    let provider = one("grafana/provisioning/dashboards/dashboards.yaml");
    let folder = provider["providers"][0]["options"]["path"].as_str().expect("a folder");
    let mounted = list(&services["grafana"]["volumes"]).iter().filter_map(Yaml::as_str);
    assert!(mounted.into_iter().any(|volume| volume.contains(&format!(":{folder}/ostinato.json"))), "{folder}");
    let rules = one("prometheus.yaml")["rule_files"][0].as_str().expect("a file").to_owned();
    let mounted = list(&services["prometheus"]["volumes"]).iter().filter_map(Yaml::as_str);
    assert!(mounted.into_iter().any(|volume| volume.contains(&format!("./alerts.yaml:{rules}"))), "{rules}");
}

/// Returns the router's interpretation of its command-line arguments.
fn router(arguments: &[String]) -> serde_json::Value {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/router.py");
    let output = Command::new(python()).arg(script).args(arguments).output().expect("Python runs");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn words(yaml: &Yaml) -> Vec<String> {
    list(yaml).iter().map(|word| word.as_str().expect("a word").to_owned()).collect()
}

#[test]
fn a_fleets_router_finds_its_workers() {
    let (config, fleet, compose) = (container(), one("fleet.yaml"), one("compose.yaml"));
    let mut aliases: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (name, service) in entries(&fleet["services"]).filter(|(name, _)| *name != "router") {
        let profile = service["profiles"][0].as_str().expect("a profile");
        let own: Vec<&str> = list(&service["networks"]["default"]["aliases"]).iter().filter_map(Yaml::as_str).collect();
        assert_eq!(own[0], "ostinato", "{name}: Prometheus asks for it");
        assert!(aliases.entry(profile).or_default().insert(own[1]), "{name}: another is called {}", own[1]);
        let grace = service["stop_grace_period"].as_str().and_then(|s| s.strip_suffix('s')?.parse::<f64>().ok());
        assert!(grace.expect("seconds") > config.server.drain_seconds, "{name} is killed while it drains");
        // In all other respects it is a worker of compose.yaml.
        let like = &compose["services"][if profile == "fleet" { "ostinato-nvidia" } else { "ostinato-cpu" }];
        for key in ["build", "image", "volumes", "command"] {
            assert_eq!(service[key], like[key], "{name}: {key}");
        }
        assert_eq!(service["healthcheck"]["test"], like["healthcheck"]["test"], "{name}");
    }
    let service = &fleet["services"]["router"];
    let profiles: BTreeSet<&str> = list(&service["profiles"]).iter().filter_map(Yaml::as_str).collect();
    assert_eq!(profiles, aliases.keys().copied().collect());
    let read = router(&words(&service["command"]));
    let urls: BTreeSet<&str> =
        read["worker_urls"].as_array().expect("a list").iter().filter_map(|url| url.as_str()).collect();
    for (profile, names) in &aliases {
        let wanted: BTreeSet<String> =
            names.iter().map(|name| format!("grpc://{name}:{}", config.server.listen.port())).collect();
        assert_eq!(urls, wanted.iter().map(String::as_str).collect(), "{profile}");
    }
    let scraped = &one("prometheus.yaml")["scrape_configs"][1]["dns_sd_configs"][0];
    assert_eq!(
        (scraped["names"][0].as_str(), scraped["port"].as_i64()),
        (Some("router"), read["prometheus_port"].as_i64())
    );
    assert_eq!(service["ports"][0].as_str(), Some(format!("127.0.0.1:{0}:{0}", read["port"]).as_str()));
    assert!(text("router.Dockerfile").contains(&format!("EXPOSE {} {}", read["port"], read["prometheus_port"])));
    let traces = config.telemetry.otlp_endpoint.expect("traces go somewhere");
    assert_eq!(read["otlp_traces_endpoint"].as_str().map(|at| format!("http://{at}")), Some(traces.clone()));
    assert_eq!(read["enable_trace"], true);

    let all = yaml("kubernetes.yaml");
    let (deployments, namespaces) = (objects(&all, "Deployment"), objects(&all, "Namespace"));
    let pod = &deployments["router"]["spec"]["template"]["spec"];
    let in_cluster = router(&words(&pod["containers"][0]["args"]));
    for key in ["host", "port", "policy", "prometheus_port", "enable_trace", "otlp_traces_endpoint"] {
        assert_eq!(in_cluster[key], read[key], "{key}");
    }
    assert_eq!(in_cluster["service_discovery"], true);
    assert_eq!(in_cluster["service_discovery_port"], config.server.listen.port());
    let namespace = in_cluster["service_discovery_namespace"].as_str().expect("a namespace");
    assert!(namespaces.contains_key(namespace));
    let labels = &deployments["ostinato"]["spec"]["template"]["metadata"]["labels"];
    let selector = in_cluster["selector"].as_object().expect("labels");
    assert!(
        !selector.is_empty() && selector.iter().all(|(key, value)| labels[key.as_str()].as_str() == value.as_str())
    );
    // The router's service account may list and watch pods.
    let account = pod["serviceAccountName"].as_str().expect("an account");
    assert!(objects(&all, "ServiceAccount").contains_key(account));
    let binding = objects(&all, "RoleBinding")["router"];
    assert_eq!(binding["subjects"][0]["name"].as_str(), Some(account));
    assert_eq!(binding["subjects"][0]["namespace"].as_str(), Some(namespace));
    let role = objects(&all, "Role")[binding["roleRef"]["name"].as_str().expect("a role")];
    assert_eq!(words(&role["rules"][0]["verbs"]), ["get", "list", "watch"]);
}

#[test]
fn a_router_that_is_given_what_it_does_not_know_says_so() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/router.py");
    let output = Command::new(python()).arg(script).arg("--polcy=cache_aware").output().expect("Python runs");
    assert!(!output.status.success() && String::from_utf8_lossy(&output.stderr).contains("--polcy"));
}

/// The Kubernetes release whose schemas are used.
const KUBERNETES: &str = "1.33";

fn held_against_schemas(file: &Path) -> Result<String, String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/kubernetes.py");
    let output = Command::new(python()).arg(script).arg(file).arg(KUBERNETES).output().expect("Python runs");
    let said = |bytes| String::from_utf8(bytes).expect("text");
    if output.status.success() { Ok(said(output.stdout)) } else { Err(said(output.stderr)) }
}

#[test]
fn objects_keep_to_the_schemas_of_kubernetes() {
    let kept = held_against_schemas(&deploy().join("kubernetes.yaml")).unwrap_or_else(|problem| panic!("{problem}"));
    assert_eq!(kept.lines().count(), yaml("kubernetes.yaml").len(), "{kept}");
    // Checks that a misspelled field is detected.
    let wrong = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(wrong.path(), text("kubernetes.yaml").replace("readinessProbe:", "readynessProbe:"))
        .expect("written");
    let problem = held_against_schemas(wrong.path()).expect_err("no such field");
    assert!(problem.contains("readynessProbe"), "{problem}");
}

/// Returns the workers' deployment.
fn workers() -> Yaml {
    let all = yaml("kubernetes.yaml");
    objects(&all, "Deployment")["ostinato"].clone()
}

#[test]
fn the_network_policy_admits_every_client_of_the_workers() {
    let all = yaml("kubernetes.yaml");
    let deployments = objects(&all, "Deployment");
    let template = |name: &str| &deployments[name]["spec"]["template"];
    let policy = &objects(&all, "NetworkPolicy")["ostinato"]["spec"];
    assert!(selects(&policy["podSelector"]["matchLabels"], template("ostinato")));
    let rule = |rule: &Yaml, peers: &str| {
        let peer = &rule[peers][0]["podSelector"]["matchLabels"];
        let whose = deployments.keys().find(|name| selects(peer, template(name))).copied();
        (whose, list(&rule["ports"]).iter().map(|port| port["port"].as_i64().unwrap()).collect::<Vec<_>>())
    };
    let config = container();
    let grpc = i64::from(config.server.listen.port());
    let admin = i64::from(config.admin.listen.expect("it is on").port());
    let entering: Vec<_> = list(&policy["ingress"]).iter().map(|of| rule(of, "from")).collect();
    assert_eq!(entering, [(Some("router"), vec![grpc]), (Some("prometheus"), vec![admin])]);
    // The service offers no port that the policy closes.
    let offered = list(&objects(&all, "Service")["ostinato"]["spec"]["ports"]).iter();
    let offered: BTreeSet<i64> = offered.map(|port| port["port"].as_i64().unwrap()).collect();
    assert_eq!(offered, entering.iter().flat_map(|(_, ports)| ports).copied().collect());
    let (_, collector) = host_and_port(config.telemetry.otlp_endpoint.as_deref().expect("traces go somewhere"));
    let leaving: Vec<_> = list(&policy["egress"]).iter().map(|of| rule(of, "to")).collect();
    assert_eq!(leaving, [(None, vec![53, 53]), (Some("otel-collector"), vec![collector.into()])]);
}

/// Applies the operation of a JSON patch to an object. Only operations that the components use are supported.
fn patch(object: &mut Yaml, operation: &Yaml) {
    let path = operation["path"].as_str().expect("a path");
    let (parent, last) = path.rsplit_once('/').expect("a path");
    let place = parent.split('/').skip(1).fold(object, |at, key| match at {
        Yaml::Array(list) => &mut list[key.parse::<usize>().expect("an index")],
        Yaml::Hash(hash) => hash.get_mut(&Yaml::String(key.to_owned())).unwrap_or_else(|| panic!("no {key}: {path}")),
        _ => panic!("{path} leads nowhere"),
    });
    let key = Yaml::String(last.to_owned());
    match (operation["op"].as_str().expect("an operation"), place) {
        ("add", Yaml::Array(list)) if last == "-" => list.push(operation["value"].clone()),
        ("replace", Yaml::Hash(hash)) if hash.contains_key(&key) => _ = hash.insert(key, operation["value"].clone()),
        ("remove", Yaml::Hash(hash)) if hash.contains_key(&key) => _ = hash.remove(&key),
        (operation, _) => panic!("{operation} of {path}"),
    }
}

/// Goal: the components that `kustomization.yaml` offers can be used as they are. Method: their patches are applied to
/// the workers' deployment, and the result and their objects are checked against Kubernetes' schemas.
#[test]
fn components_change_what_is_there() {
    let offered = text("kustomization.yaml");
    let offered: Vec<&str> = offered.lines().filter_map(|line| line.strip_prefix("#   - ")).collect();
    assert_eq!(offered, ["weights", "autoscaling"]);
    // Kustomize reads the list without its `#`.
    let list_of = text("kustomization.yaml").replace("\n# components:", "\ncomponents:").replace("\n#   ", "\n  ");
    let documents = YamlLoader::load_from_str(&list_of).expect("YAML");
    assert_eq!(words(&documents[0]["components"]), offered);
    let generated = one("kustomization.yaml");
    let generated: Vec<&str> =
        list(&generated["configMapGenerator"]).iter().filter_map(|map| map["name"].as_str()).collect();
    let mut workers = workers();
    for name in &offered {
        let component = one(&format!("{name}/kustomization.yaml"));
        assert_eq!(component["kind"].as_str(), Some("Component"), "{name}");
        for resource in words(&component["resources"]) {
            let file = format!("{name}/{resource}");
            let kept = held_against_schemas(&deploy().join(&file)).unwrap_or_else(|problem| panic!("{problem}"));
            assert_eq!(kept.lines().count(), yaml(&file).len(), "{kept}");
        }
        for map in list(&component["configMapGenerator"]) {
            assert!(generated.contains(&map["name"].as_str().expect("a name")), "{name} replaces what is not there");
            assert!(words(&map["files"]).iter().all(|file| deploy().join(name).join(file).is_file()), "{name}");
        }
        for change in list(&component["patches"]) {
            assert_eq!(change["target"]["kind"], workers["kind"], "{name}");
            assert_eq!(change["target"]["name"], workers["metadata"]["name"], "{name}");
            let operations = YamlLoader::load_from_str(change["patch"].as_str().expect("a patch")).expect("YAML");
            list(&operations[0]).iter().for_each(|operation| patch(&mut workers, operation));
        }
    }
    let mut changed = String::new();
    YamlEmitter::new(&mut changed).dump(&workers).expect("YAML");
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), &changed).expect("written");
    held_against_schemas(file.path()).unwrap_or_else(|problem| panic!("{problem}\n{changed}"));

    // The workers see the files that the job downloads, where their configuration looks for them.
    let sources = Sources { file: Some(deploy().join("weights/ostinato.toml")), ..Sources::default() };
    let mut config = from_sources(&sources).unwrap_or_else(|e| panic!("{e}"));
    let path = config.models[0].path.to_str().expect("UTF-8").to_owned();
    config.models = container().models;
    assert_eq!(config, container(), "only the models differ");
    let all = yaml("weights/volume.yaml");
    let claim = objects(&all, "PersistentVolumeClaim").into_keys().next().expect("a claim");
    for template in [&workers["spec"]["template"], &objects(&all, "Job")["download"]["spec"]["template"]] {
        let volume = list(&template["spec"]["volumes"])
            .iter()
            .find(|volume| volume["persistentVolumeClaim"]["claimName"].as_str() == Some(claim))
            .expect("a volume of the claim");
        let container = &template["spec"]["containers"][0];
        let mount = list(&container["volumeMounts"]).iter().find(|mount| mount["name"] == volume["name"]);
        assert!(path.starts_with(mount.expect("a mount")["mountPath"].as_str().expect("a path")), "{path}");
    }
    let job = &objects(&all, "Job")["download"]["spec"]["template"]["spec"]["containers"][0];
    assert!(job["args"][0].as_str().expect("a script").ends_with(&format!("mv {path}.part {path}\n")));
    assert!(text("router.Dockerfile").contains(&format!("FROM {}\n", job["image"].as_str().expect("an image"))));

    // The metric exists, and the adapter's rule gives it the name under which it is asked for.
    let scaler = one("autoscaling/autoscaler.yaml")["spec"].clone();
    assert_eq!(scaler["scaleTargetRef"]["name"], workers["metadata"]["name"]);
    assert!(workers["spec"]["replicas"].is_badvalue(), "the autoscaler decides");
    let metric = scaler["metrics"][0]["external"]["metric"]["name"].as_str().expect("a metric");
    let adapter = one("autoscaling/adapter.yaml");
    let rule = &adapter["rules"]["external"][0];
    assert_eq!(rule["name"]["as"].as_str(), Some(metric));
    let documented = documented();
    for query in ["seriesQuery", "metricsQuery"] {
        let found = problems(rule[query].as_str().expect("a query"), &[], &documented);
        assert!(found.is_empty(), "{found:?}");
    }
    let url = adapter["prometheus"]["url"].as_str().expect("an address").trim_start_matches("http://");
    let (service, namespace) = url.trim_end_matches(".svc").split_once('.').expect("SERVICE.NAMESPACE.svc");
    let all = yaml("kubernetes.yaml");
    assert!(objects(&all, "Namespace").contains_key(namespace));
    assert_eq!(adapter["prometheus"]["port"], objects(&all, "Service")[service]["spec"]["ports"][0]["port"]);
}

#[test]
fn objects_of_extensions_choose_the_workers() {
    let all = yaml("kubernetes.yaml");
    let ostinato = &objects(&all, "Deployment")["ostinato"]["spec"]["template"];
    let namespace = &objects(&all, "Namespace")["ostinato"]["metadata"]["name"];
    let ports = list(&ostinato["spec"]["containers"][0]["ports"]);
    let (monitor, pool) = (one("podmonitor.yaml"), one("inferencepool.yaml"));
    for object in [&monitor, &pool] {
        assert_eq!(object["metadata"]["namespace"], *namespace);
        assert!(selects(&object["spec"]["selector"]["matchLabels"], ostinato), "{object:?}");
    }
    assert_eq!(monitor["apiVersion"].as_str(), Some("monitoring.coreos.com/v1"));
    let scraped = &monitor["spec"]["podMetricsEndpoints"][0];
    assert!(ports.iter().any(|port| port["name"] == scraped["port"]), "{scraped:?}");
    assert_eq!(scraped["path"], one("prometheus.yaml")["scrape_configs"][0]["metrics_path"]);
    // The alerts select the job "ostinato".
    let job = monitor["spec"]["jobLabel"].as_str().expect("a label");
    assert_eq!(ostinato["metadata"]["labels"][job].as_str(), Some("ostinato"));
    assert_eq!(pool["apiVersion"].as_str(), Some("inference.networking.k8s.io/v1"));
    assert_eq!(pool["spec"]["targetPorts"][0]["number"].as_i64(), Some(container().server.listen.port().into()));
    assert_eq!(pool["spec"]["appProtocol"].as_str(), Some("kubernetes.io/h2c"), "gRPC is HTTP/2");
    // The label tells an endpoint picker the engine, and with it the metric names to read.
    assert_eq!(ostinato["metadata"]["labels"]["llm-d.ai/engine-type"].as_str(), Some("vllm"));
    assert!(documented().contains_key("vllm:num_requests_waiting"));
}

/// The highest exposure that `systemd-analyze security` may report, in tenths of its scale from 0 to 10.
const EXPOSURE: &str = "25";

/// Writes the unit file, changed so that it runs the program built from this tree, and returns its path.
fn unit(folder: &Path, change: impl Fn(String) -> String) -> PathBuf {
    let unit = text("ostinato.service");
    assert!(unit.contains("ExecStart=/usr/local/bin/ostinato serve --config /etc/ostinato/ostinato.toml\n"));
    let unit = unit.replace("/usr/local/bin/ostinato", env!("CARGO_BIN_EXE_ostinato"));
    let path = folder.join("ostinato.service");
    std::fs::write(&path, change(unit)).expect("a unit");
    path
}

fn analyze(arguments: &[&str], unit: &Path) -> (bool, String) {
    let output = Command::new("systemd-analyze").args(arguments).arg(unit).output();
    let output = output.unwrap_or_else(|e| panic!("systemd-analyze ({e}): run deploy/setup.sh test"));
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

#[test]
fn the_unit_is_one_that_systemd_reads_and_that_exposes_little() {
    let folder = tempfile::tempdir().expect("a folder");
    let verify = ["verify", "--man=no"];
    assert_eq!(analyze(&verify, &unit(folder.path(), |unit| unit)), (true, String::new()));
    // Checks that an unknown key is detected.
    let (_, said) = analyze(&verify, &unit(folder.path(), |unit| unit.replace("KillMode=", "KilMode=")));
    assert!(said.contains("KilMode"), "{said}");
    let security = ["security", "--offline=yes", "--no-pager", "--threshold", EXPOSURE];
    let (kept, said) = analyze(&security, &unit(folder.path(), |unit| unit));
    assert!(kept && said.contains("Overall exposure level"), "{said}");
    let (kept, said) = analyze(&security, &unit(folder.path(), |unit| unit.replace("CapabilityBoundingSet=\n", "")));
    assert!(!kept, "{said}");
}

/// Goal: the server is restarted whatever ends it and however often. Method: the restart rules of each supervisor are
/// checked.
#[test]
fn whatever_ends_the_server_it_comes_back() {
    let unit = text("ostinato.service");
    let value = |key: &str| unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    // systemd stops restarting a unit after `StartLimitBurst` starts within `StartLimitIntervalSec`, by default five in
    // ten seconds. An interval of 0 removes this limit.
    assert_eq!((value("StartLimitIntervalSec"), value("StartLimitBurst")), (Some("0"), None));
    assert_eq!(value("Restart"), Some("on-failure"), "after any end but one that was asked for");
    assert_eq!(
        value("OOMPolicy"),
        Some("continue"),
        "a worker process that is ended for want of memory ends the server"
    );
    let pause: f64 = value("RestartSec").and_then(|seconds| seconds.parse().ok()).expect("a pause");
    assert!((1.0..=30.0).contains(&pause), "it neither spins nor is missed for long");
    for key in ["RestartPreventExitStatus", "RestartForceExitStatus", "SuccessExitStatus"] {
        assert_eq!(value(key), None, "{key}: no end is a reason to stay away");
    }
    for file in ["compose.yaml", "fleet.yaml"] {
        for (name, service) in entries(&one(file)["services"]) {
            let restart = service["restart"].as_str();
            assert!(matches!(restart, Some("unless-stopped" | "always")), "{file}, {name}: restart is {restart:?}");
        }
    }
    // Pods of a deployment are restarted without a limit. The startup probe must not kill a pod that is still loading.
    let all = yaml("kubernetes.yaml");
    for (name, deployment) in objects(&all, "Deployment") {
        let pod = &deployment["spec"]["template"]["spec"];
        assert!(matches!(pod["restartPolicy"].as_str(), None | Some("Always")), "{name}");
    }
    let pod = &objects(&all, "Deployment")["ostinato"]["spec"]["template"]["spec"]["containers"][0];
    let probe = &pod["startupProbe"];
    let seconds = |key: &str| probe[key].as_i64().unwrap_or(1);
    assert!(seconds("periodSeconds") * seconds("failureThreshold") >= 600, "large models load for minutes");
}

#[test]
fn the_unit_gives_the_program_what_it_needs() {
    let unit = text("ostinato.service");
    let value = |key: &str| -> Vec<&str> {
        unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('=')).collect()
    };
    let one = |key: &str| *value(key).first().unwrap_or_else(|| panic!("no {key}"));
    let default = Config::default();
    assert!(
        one("TimeoutStopSec").parse::<f64>().expect("seconds") > default.server.drain_seconds,
        "killed while it drains"
    );
    assert_eq!(one("ExecReload"), "/bin/kill -HUP $MAINPID");
    assert!(one("LimitNOFILE").parse::<u32>().expect("a number") >= 65536);
    assert_eq!(value("DeviceAllow"), ["char-drm rw", "char-nvidia* rw"]);
    // These settings would keep a driver from opening its device or from compiling shaders.
    for key in ["PrivateDevices", "MemoryDenyWriteExecute", "ProcSubset"] {
        assert!(value(key).is_empty(), "{key}");
    }
    // The unit may write to its cache directory, and the variable is one that the program reads.
    let variable = one("Environment");
    assert_eq!(variable, format!("OSTINATO_RUNTIME__CACHE_DIRECTORY=%C/{}", one("CacheDirectory")));
    // The example configuration that the unit file's header refers to is accepted.
    let sources = Sources { file: Some(deploy().join("ostinato.toml")), ..Sources::default() };
    from_sources(&sources).unwrap_or_else(|e| panic!("{e}"));
}

//! Tests of `Config` and its sources: the example file is valid, all problems are reported at once with key, rule and
//! value, and the sources override each other in the documented order.

use ostinato::config::{
    Bytes, Config, ConfigError, Model, Placement, Problem, Selector, Sources, SplitMode, from_sources, tokens,
};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

fn write(text: &str) -> (tempfile::TempDir, Sources) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ostinato.toml");
    std::fs::write(&file, text).unwrap();
    let sources = Sources { file: Some(file), ..Sources::default() };
    (folder, sources)
}

fn read(text: &str) -> Result<Config, ConfigError> {
    let (_folder, sources) = write(text);
    from_sources(&sources)
}

#[track_caller]
fn problems(text: &str) -> Vec<Problem> {
    match read(text) {
        Err(ConfigError::Problems(problems)) => problems,
        other => panic!("expected problems, got {other:?}"),
    }
}

#[test]
fn nothing_said_is_the_default_and_listens_on_loopback() {
    let config = from_sources(&Sources::default()).unwrap();
    assert_eq!(config, Config::default());
    assert_eq!(config.server.listen.to_string(), "127.0.0.1:50051");
    assert_eq!(config.admin.listen.unwrap().to_string(), "127.0.0.1:9464");
}

/// The example configuration with its comments taken off: `# key = value`, `# [[models]]`, `#   { … }`, `# ]` and
/// `# # comment` lose one `# `.
fn uncommented() -> String {
    include_str!("../../deploy/ostinato.toml")
        .lines()
        .map(|line| match line.strip_prefix("# ") {
            Some(rest)
                if rest.starts_with("[[")
                    || rest.starts_with("  {")
                    || rest.starts_with(']')
                    || rest.starts_with("# ")
                    || rest.split_once(" = ").is_some_and(|(key, _)| {
                        key.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
                    }) =>
            {
                format!("{rest}\n")
            }
            _ => format!("{line}\n"),
        })
        .collect()
}

#[test]
fn the_example_is_valid_as_it_stands_and_with_its_comments_taken_off() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/ostinato.toml");
    let sources = Sources { file: Some(path), ..Sources::default() };
    let config = from_sources(&sources).unwrap();
    assert_eq!(config.models.len(), 1);
    assert_eq!(config.models[0].path, PathBuf::from("embedded:demo"));

    let uncommented = uncommented();
    let config = read(&uncommented).unwrap();
    assert_eq!(config.models.len(), 2, "{uncommented}");
    let model = &config.models[1];
    assert_eq!((model.context, model.load), (Some(32768), ostinato::config::LoadWhen::Request));
    assert_eq!(model.memory_limit, Some(Bytes(70 << 30)));
    assert_eq!(model.replicas[1].memory_limit, Some(Bytes(40 << 30)));
    let split = &model.replicas[2];
    assert_eq!((split.devices.len(), split.split, &split.shares[..]), (2, Some(SplitMode::Layers), &[3, 1][..]));
    assert_eq!((model.snapshots, model.drafts, model.drafts_always), (Some(64), Some(3), Some(true)));
    assert_eq!(model.draft, Some(ostinato::config::Draft::Lookup));
    // The values in the example's comments are the default values.
    let server = config.server;
    assert_eq!(server.client_limit, Some(32));
    let (tls, tokens) = (server.tls.clone(), server.tokens.clone());
    assert!(tokens.as_ref().is_some_and(|path| path.is_absolute()), "relative to the file");
    assert!(tls.as_ref().is_some_and(|tls| tls.client_ca.is_some()));
    let shown = ostinato::config::Server {
        listen: server.listen,
        client_limit: server.client_limit,
        tls,
        tokens,
        ..Default::default()
    };
    assert_eq!(server, shown);
    assert_eq!(config.http, ostinato::config::HttpConfig::default());
    assert_eq!(config.admin, ostinato::config::AdminConfig::default());
    assert_eq!(config.telemetry.sample_ratio, 1.0);
    assert_eq!(config.telemetry.log, ostinato::config::Telemetry::default().log);
    assert_eq!(config.telemetry.gpu_time, ostinato::config::Telemetry::default().gpu_time);
    assert_eq!(config.runtime.tune, ostinato::config::Config::default().runtime.tune);
}

#[test]
fn a_draft_model_is_named_relative_to_the_file() {
    let text =
        |draft: &str| format!("[[models]]\nname = \"m\"\npath = \"big\"\ndraft = \"{draft}\"\nreplicas = [{{}}]\n");
    let draft = |given: &str| {
        let (folder, sources) = write(&text(given));
        (folder.path().to_owned(), from_sources(&sources).map(|config| config.models[0].draft.clone()))
    };
    for given in ["small", "./lookup", "small.gguf"] {
        let (folder, found) = draft(given);
        assert_eq!(found.expect("it is a path"), Some(ostinato::config::Draft::Model(folder.join(given))));
    }
    for (given, path) in [("/models/small", "/models/small"), ("embedded:demo", "embedded:demo")] {
        assert_eq!(draft(given).1.expect("a path"), Some(ostinato::config::Draft::Model(path.into())));
    }
    assert_eq!(draft("lookup").1.expect("a kind"), Some(ostinato::config::Draft::Lookup));
    let problems = problems(&text(""));
    assert!(problems.len() == 1 && problems[0].key == "models[0].draft", "{problems:?}");
    assert!(problems[0].rule.contains("neither lookup nor a draft model"), "{problems:?}");
}

/// Keys that the example has in a comment only, with the reason.
const SHOWN_IN_A_COMMENT: [(&str, &str); 1] = [("models.kv_memory", "it excludes kv_pages, which is shown")];

/// Goal: a new key is shown in the example. Method: an unknown key in each table has the configuration name the known
/// ones, and the example is read as plain TOML.
#[test]
fn the_example_shows_every_key() {
    use figment::providers::{Format, Toml};
    let shown: serde_json::Value = figment::Figment::from(Toml::string(&uncommented())).extract().expect("TOML");
    let keys = |tables: &[&serde_json::Value]| -> BTreeSet<String> {
        tables.iter().flat_map(|table| table.as_object().expect("a table").keys().cloned()).collect()
    };
    let models: Vec<_> = shown["models"].as_array().expect("models").iter().collect();
    let replicas: Vec<_> = models.iter().flat_map(|model| model["replicas"].as_array().expect("replicas")).collect();
    let (mut compared, mut missing) = (0, Vec::new());
    for (table, wrong, shown) in [
        ("", "unknown = 1".to_owned(), keys(&[&shown])),
        ("server.", "[server]\nunknown = 1".to_owned(), keys(&[&shown["server"]])),
        ("server.tls.", "[server.tls]\nunknown = 1".to_owned(), keys(&[&shown["server"]["tls"]])),
        ("http.", "[http]\nunknown = 1".to_owned(), keys(&[&shown["http"]])),
        ("admin.", "[admin]\nunknown = 1".to_owned(), keys(&[&shown["admin"]])),
        ("telemetry.", "[telemetry]\nunknown = 1".to_owned(), keys(&[&shown["telemetry"]])),
        ("runtime.", "[runtime]\nunknown = 1".to_owned(), keys(&[&shown["runtime"]])),
        ("models.", "[[models]]\nunknown = 1".to_owned(), keys(&models)),
        ("models.replicas.", "models = [{ replicas = [{ unknown = 1 }] }]".to_owned(), keys(&replicas)),
    ] {
        let found = problems(&wrong);
        let rule = found.iter().find_map(|problem| problem.rule.strip_prefix("is not a key; known here are "));
        let known: BTreeSet<String> = rule.expect("a list of keys").split(", ").map(str::to_owned).collect();
        compared += known.len();
        let commented = |key: &&String| SHOWN_IN_A_COMMENT.iter().any(|(name, _)| **name == format!("{table}{key}"));
        missing.extend(known.difference(&shown).filter(|key| !commented(key)).map(|key| format!("{table}{key}")));
    }
    assert!(missing.is_empty(), "deploy/ostinato.toml does not show {missing:?}");
    assert!(compared > 45, "only {compared} keys were compared");
    for (key, _) in SHOWN_IN_A_COMMENT {
        let (_, name) = key.rsplit_once('.').expect("TABLE.KEY");
        let text = include_str!("../../deploy/ostinato.toml");
        assert!(text.contains(&format!("`{name} = ")), "{key} is in no comment");
    }
}

#[test]
fn the_page_about_the_configuration_lists_the_standard_variables() {
    let page = include_str!("../../docs/configuration.md");
    let listed: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("| `OTEL_")?.split('`').next()).collect();
    let read: Vec<&str> =
        ostinato::config::OTEL_VARIABLES.iter().map(|name| name.strip_prefix("OTEL_").expect("a prefix")).collect();
    assert_eq!(listed, read);
}

#[test]
fn every_problem_is_reported_at_once_with_key_rule_and_value() {
    let problems = problems(
        r#"
        colour = "blue"

        [server]
        listen = "0.0.0.0:50051"
        queue_limit = -1
        client_limit = 0
        drain_seconds = "soon"
        port = 5

        [telemetry]
        sample_ratio = 1.5
        otlp_endpoint = "collector:4317"

        [[models]]
        name = "a"
        path = "/models/a"
        replicas = [{ device = "0" }, { device = " " }, { devise = "1" }, { device = "pci:zz" }]
        kv_pages = 10
        kv_memory = "1GiB"

        [[models]]
        name = "a"
        memory_limit = "lots"
        context = 0
        "#,
    );
    let find = |key: &str| {
        problems
            .iter()
            .find(|problem| problem.key == key)
            .unwrap_or_else(|| panic!("no problem of {key} in {problems:#?}"))
    };
    assert!(find("colour").rule.contains("known here are admin, http, models, runtime, server, telemetry"));
    assert_eq!(find("server.listen").value.as_deref(), Some("0.0.0.0:50051"));
    assert!(find("server.listen").rule.contains("insecure"));
    assert_eq!(find("server.queue_limit").value.as_deref(), Some("-1"));
    assert_eq!(find("server.client_limit").value.as_deref(), Some("0"));
    assert_eq!(find("server.drain_seconds").value.as_deref(), Some("\"soon\""));
    assert!(find("server.port").rule.contains("listen"));
    assert_eq!(find("telemetry.sample_ratio").value.as_deref(), Some("1.5"));
    assert!(find("telemetry.otlp_endpoint").rule.contains("http://"));
    assert!(find("models[0].replicas[1].device").rule.contains("it is empty"));
    assert!(find("models[0].replicas[3].device").rule.contains("a PCI address looks like"));
    assert!(find("models[0].replicas[2].devise").rule.contains("device"));
    assert!(find("models[0].kv_memory").rule.contains("kv_pages"));
    assert!(find("models[1].name").rule.contains("models[0].name"));
    assert!(find("models[1].path").rule.contains("given"));
    assert!(find("models[1].replicas").rule.contains("given"));
    assert_eq!(find("models[1].memory_limit").value.as_deref(), Some("\"lots\""));
    assert_eq!(find("models[1].context").value.as_deref(), Some("0"));
    assert_eq!(problems.len(), 17, "{problems:#?}");
    // The problem names the source of the value.
    let source = find("server.drain_seconds").source.as_deref().unwrap();
    assert!(source.ends_with("ostinato.toml"), "{source}");
    // The problems together are one readable error message.
    let text = ConfigError::Problems(problems.clone()).to_string();
    assert!(text.starts_with("the configuration has 17 problems:\n  "), "{text}");
}

/// Goal: addresses of models' own endpoints that cannot be had are refused with all other problems. Method: each model's
/// address has another mistake.
#[test]
fn addresses_of_models_are_checked_against_each_other_and_all_endpoints() {
    let model = |name: &str, listen: &str| {
        format!("[[models]]\nname = \"{name}\"\npath = \"/m\"\nreplicas = [{{}}]\nlisten = {listen}\n")
    };
    let wrong = [
        ("\"127.0.0.1:50051\"", vec!["must differ from server.listen"]),
        ("\"127.0.0.1:8000\"", vec!["must differ from http.listen"]),
        ("\"127.0.0.1:9464\"", vec!["must differ from admin.listen"]),
        ("\"127.0.0.1:50061\"", vec![]),
        ("\"127.0.0.1:50061\"", vec!["must differ from models[3].listen"]),
        ("\"0.0.0.0:50061\"", vec!["loopback", "models[3].listen", "models[4].listen"]),
        ("\"127.0.0.1:0\"", vec![]),
        ("\"127.0.0.1:0\"", vec![]),
        ("\"localhost\"", vec!["must be an address and port such as 127.0.0.1:50051"]),
        ("50061", vec!["must be a string"]),
    ];
    let text: String =
        wrong.iter().enumerate().map(|(index, (listen, _))| model(&format!("m{index}"), listen)).collect();
    let found = problems(&format!("[server]\nqueue_limit = 0\n{text}"));
    for (index, (listen, rules)) in wrong.iter().enumerate() {
        let key = format!("models[{index}].listen");
        let told: Vec<&str> = found.iter().filter(|p| p.key == key).map(|problem| &*problem.rule).collect();
        assert_eq!(told.len(), rules.len(), "{listen}: {told:?}");
        for rule in rules {
            assert!(told.iter().any(|told| told.contains(rule)), "{listen}: {rule} in {told:?}");
        }
    }
    assert!(found.iter().any(|problem| problem.key == "server.queue_limit"), "{found:#?}");
    // With certificates or with `insecure` other machines may reach it.
    let open = model("m", "\"0.0.0.0:50061\"");
    let config = read(&format!("[server]\ninsecure = true\n{open}")).unwrap();
    assert_eq!(config.models[0].listen, Some("0.0.0.0:50061".parse().unwrap()));
    assert!(read(&format!("[server.tls]\ncertificate = \"c\"\nkey = \"k\"\n{open}")).is_ok());
    // A model that arguments give another path keeps its address.
    let (_folder, mut sources) = write(&model("m", "\"127.0.0.1:50061\""));
    sources.models = vec![Model::new("m", "/other", None)];
    let replaced = from_sources(&sources).unwrap().models.remove(0);
    assert_eq!((replaced.path, replaced.listen), (PathBuf::from("/other"), "127.0.0.1:50061".parse().ok()));
}

#[test]
fn an_address_of_the_command_line_that_is_none_is_told_with_its_source() {
    let sources = Sources { listen: Some("bad".to_owned()), ..Sources::default() };
    let error = from_sources(&sources).unwrap_err().to_string();
    let line = "server.listen must be an address and port such as 127.0.0.1:50051, is \"bad\" (the command line)";
    assert!(error.contains(line), "{error}");
}

#[test]
fn what_concerns_recurrent_state_and_drafts_is_read_and_left_to_the_engine_where_nothing_is_said() {
    let model = |more: &str| {
        let text = format!("[[models]]\nname = \"m\"\npath = \"demo-hybrid\"\nreplicas = [{{}}]\n{more}");
        read(&text).unwrap().models.remove(0)
    };
    let left_out = model("");
    assert_eq!((left_out.snapshots, left_out.drafts, left_out.drafts_always), (None, None, None));
    let said = model("snapshots = 12\ndrafts = 2\ndrafts_always = true\n");
    assert_eq!((said.snapshots, said.drafts, said.drafts_always), (Some(12), Some(2), Some(true)));
    // Zero is a valid choice for both.
    let none = model("snapshots = 0\ndrafts = 0\ndrafts_always = false\n");
    assert_eq!((none.snapshots, none.drafts, none.drafts_always), (Some(0), Some(0), Some(false)));
    assert_eq!(said.path, PathBuf::from("demo-hybrid"), "a model of the program is not beside the file");

    let found = problems(
        "[[models]]\nname = \"m\"\npath = \"p\"\nreplicas = [{}]\nsnapshots = -1\ndrafts = \"all\"\ndrafts_always = 2\n",
    );
    for (key, value) in
        [("models[0].snapshots", "-1"), ("models[0].drafts", "\"all\""), ("models[0].drafts_always", "2")]
    {
        let problem = found.iter().find(|problem| problem.key == key).unwrap_or_else(|| panic!("{key}: {found:#?}"));
        assert_eq!(problem.value.as_deref(), Some(value));
    }
    assert_eq!(found.len(), 3, "{found:#?}");
}

#[test]
fn a_table_where_a_list_belongs_and_a_value_where_a_table_belongs_are_reported() {
    let found = problems("models = 3\nserver = []\n");
    let keys: Vec<&str> = found.iter().map(|problem| problem.key.as_str()).collect();
    assert_eq!(keys.len(), 2, "{found:?}");
    assert!(keys.contains(&"models") && keys.contains(&"server"), "{found:?}");
    let found = problems("models = [3]\n");
    assert_eq!(found[0].key, "models[0]", "{found:?}");
    let found = problems("models = [{ name = \"a\", path = \"b\", replicas = [\"0\"] }]\n");
    assert_eq!(found[0].key, "models[0].replicas[0]", "{found:?}");
    assert!(found[0].rule.contains("table") && found[0].value.as_deref() == Some("\"0\""));
}

#[test]
fn a_file_that_is_missing_or_not_toml_is_named() {
    let file = PathBuf::from("/nowhere/ostinato.toml");
    let sources = Sources { file: Some(file), ..Sources::default() };
    let error = from_sources(&sources).unwrap_err();
    assert!(matches!(error, ConfigError::Read { .. }));
    assert!(error.to_string().contains("/nowhere/ostinato.toml"));
    let error = read("[server\nlisten = 1").unwrap_err();
    assert!(matches!(error, ConfigError::Syntax { .. }), "{error:?}");
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("line 1"), "{cause}");
}

#[test]
fn a_configuration_is_a_regular_file_of_a_bounded_size() {
    let (folder, sources) = write("");
    let file = sources.file.clone().unwrap();
    let refused = |wanted: &str| {
        let (said, heard) = std::sync::mpsc::channel();
        let (sources, path) = (sources.clone(), file.clone());
        std::thread::spawn(move || said.send((from_sources(&sources).unwrap_err(), tokens(&path).unwrap_err())));
        let (error, of_tokens) = heard.recv_timeout(Duration::from_secs(20)).expect("it waits for a pipe's other end");
        for error in [error, of_tokens] {
            assert!(matches!(error, ConfigError::Read { .. }), "{error:?}");
            assert!(error.to_string().contains("ostinato.toml"), "{error}");
            let cause = std::error::Error::source(&error).unwrap().to_string();
            assert!(cause.contains(wanted), "{cause}");
        }
        std::fs::remove_file(&file).unwrap();
    };
    std::fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(1 << 40).unwrap();
    refused("1099511627776 bytes, at most 16777216");
    assert!(std::process::Command::new("mkfifo").arg(&file).status().unwrap().success());
    refused("a named pipe, not a regular file");
    std::os::unix::fs::symlink("/dev/zero", &file).unwrap();
    refused("a character device, not a regular file");
    std::os::unix::fs::symlink(folder.path().join("gone.toml"), &file).unwrap();
    refused("a symbolic link to ");
}

#[test]
fn other_machines_are_let_in_only_when_it_is_said() {
    assert!(read("[server]\nlisten = \"0.0.0.0:1\"\ninsecure = true").is_ok());
    assert!(read("[server]\nlisten = \"[::1]:1\"").is_ok());
    let (_folder, mut sources) = write("");
    sources.listen = Some("192.168.0.1:50051".to_owned());
    assert!(from_sources(&sources).is_err());
    sources.insecure = true;
    assert!(from_sources(&sources).is_ok());
    sources.listen = Some("localhost".to_owned());
    let error = from_sources(&sources).unwrap_err().to_string();
    assert!(error.contains("server.listen") && error.contains("\"localhost\""), "{error}");
}

#[test]
fn certificates_let_other_machines_in_and_their_files_are_relative_to_the_configuration() {
    let (folder, sources) = write(
        "[server]\nlisten = \"0.0.0.0:1\"\ntokens = \"t.toml\"\n\
         [server.tls]\ncertificate = \"c.pem\"\nkey = \"/k.pem\"",
    );
    let server = from_sources(&sources).unwrap().server;
    let tls = server.tls.unwrap();
    assert_eq!((tls.certificate, tls.key), (folder.path().join("c.pem"), PathBuf::from("/k.pem")));
    assert_eq!((tls.client_ca, server.tokens), (None, Some(folder.path().join("t.toml"))));
    for (text, key, rule) in [
        ("[server]\nlisten = \"0.0.0.0:1\"", "server.listen", "server.tls"),
        ("[server.tls]\nkey = \"k\"", "server.tls.certificate", "given"),
        ("[server.tls]\ncertificate = \"c\"", "server.tls.key", "given"),
        ("[server.tls]\ncertificate = \"c\"\nkey = \"k\"\nca = \"x\"", "server.tls.ca", "client_ca"),
        ("[server]\ntls = [\"c\", \"k\"]", "server.tls", "table"),
        ("[server]\ntokens = \"t\"\ntrust_client_header = true", "server.trust_client_header", "server.tokens"),
        ("[server]\nconnections = 0", "server.connections", "between 1"),
        ("[server]\nmax_prompt_bytes = 0", "server.max_prompt_bytes", "above 0"),
    ] {
        let found = problems(text);
        let found = found.iter().find(|problem| problem.key == key).unwrap_or_else(|| panic!("{text}: {found:?}"));
        assert!(found.rule.contains(rule), "{text}: {found}");
    }
}

#[test]
fn the_http_endpoint_has_an_address_of_its_own_or_none() {
    let listen = |text: &str| read(text).map(|config| config.http.listen.map(|address| address.to_string()));
    assert_eq!(listen("").unwrap().as_deref(), Some("127.0.0.1:8000"));
    assert_eq!(listen("[http]\nlisten = \"off\"").unwrap(), None);
    assert!(listen("[http]\nlisten = \"0.0.0.0:8000\"\ninsecure = true").is_ok());
    let tls = "[server.tls]\ncertificate = \"a\"\nkey = \"b\"\n[http]\nlisten = \"0.0.0.0:8000\"";
    assert!(listen(tls).is_ok(), "the certificates are those of the server");
    for (text, value, rule) in [
        ("[http]\nlisten = \"0.0.0.0:8000\"", "0.0.0.0:8000", "http.insecure"),
        ("[http]\nlisten = \"localhost:8000\"", "\"localhost:8000\"", "or \"off\""),
        ("[http]\nlisten = \"127.0.0.1:50051\"", "127.0.0.1:50051", "must differ from server.listen"),
        ("[http]\nlisten = \"127.0.0.1:9464\"", "127.0.0.1:9464", "must differ from admin.listen"),
    ] {
        let found = problems(text);
        assert_eq!(found.len(), 1, "{text}: {found:?}");
        assert_eq!((found[0].key.as_str(), found[0].value.as_deref()), ("http.listen", Some(value)));
        assert!(found[0].rule.contains(rule), "{text}: {}", found[0].rule);
    }
    assert_eq!(problems("http = \"off\"")[0].rule, "must be a table");
    let (_folder, mut sources) = write("[http]\nlisten = \"127.0.0.1:1\"");
    sources.http = Some("off".to_owned());
    assert_eq!(from_sources(&sources).unwrap().http.listen, None);
}

#[test]
fn the_admin_endpoint_has_an_address_of_its_own_or_none() {
    let listen = |text: &str| read(text).map(|config| config.admin.listen.map(|address| address.to_string()));
    assert_eq!(listen("[admin]\nlisten = \"off\"").unwrap(), None);
    assert_eq!(listen("[admin]\nlisten = \"[::1]:0\"").unwrap().as_deref(), Some("[::1]:0"));
    assert!(listen("[admin]\nlisten = \"0.0.0.0:9464\"\ninsecure = true").is_ok());
    // Port 0 requests a free port, so two endpoints may both say 0.
    assert!(listen("[server]\nlisten = \"127.0.0.1:0\"\n[admin]\nlisten = \"127.0.0.1:0\"").is_ok());
    assert!(listen("[server]\nlisten = \"127.0.0.2:77\"\n[admin]\nlisten = \"127.0.0.1:77\"").is_ok());
    for (text, value, rule) in [
        ("[admin]\nlisten = \"0.0.0.0:9464\"", "0.0.0.0:9464", "insecure"),
        ("[server]\ninsecure = true\n[admin]\nlisten = \"0.0.0.0:9464\"", "0.0.0.0:9464", "admin.insecure"),
        ("[admin]\nlisten = \"of\"", "\"of\"", "or \"off\""),
        ("[admin]\nlisten = \"localhost:9464\"", "\"localhost:9464\"", "127.0.0.1:9464"),
        ("[admin]\nlisten = \"127.0.0.1:50051\"", "127.0.0.1:50051", "must differ from server.listen"),
        ("[server]\ninsecure = true\nlisten = \"0.0.0.0:9464\"", "127.0.0.1:9464", "must differ from server.listen"),
    ] {
        let found = problems(text);
        assert_eq!(found.len(), 1, "{text}: {found:?}");
        assert_eq!(found[0].key, "admin.listen");
        assert_eq!(found[0].value.as_deref(), Some(value));
        assert!(found[0].rule.contains(rule), "{text}: {}", found[0].rule);
    }
    assert_eq!(problems("[admin]\nport = 1")[0].key, "admin.port");
    assert_eq!(problems("admin = \"off\"")[0].rule, "must be a table");

    // Arguments of the program override the file, and `--insecure` applies to both endpoints.
    let (_folder, mut sources) = write("[admin]\nlisten = \"127.0.0.1:1\"");
    sources.admin = Some("off".to_owned());
    assert_eq!(from_sources(&sources).unwrap().admin.listen, None);
    sources.admin = Some("0.0.0.0:9464".to_owned());
    assert!(from_sources(&sources).is_err());
    sources.insecure = true;
    assert!(from_sources(&sources).is_ok());
}

#[test]
fn folders_are_relative_to_the_file_and_arguments_replace_or_add() {
    let (folder, mut sources) = write(
        r#"
        [[models]]
        name = "a"
        path = "checkpoints/a"
        replicas = [{ device = "0" }]
        context = 4096
        [[models]]
        name = "demo"
        path = "embedded:demo"
        replicas = [{}]
        [[models]]
        name = "b"
        path = "./demo"
        replicas = [{}]
        "#,
    );
    let config = from_sources(&sources).unwrap();
    assert_eq!(config.models[0].path, folder.path().join("checkpoints/a"));
    assert_eq!(config.models[1].path, PathBuf::from("embedded:demo"));
    assert_eq!(config.models[1].replicas, [Placement::default()]);
    assert_eq!(config.models[2].path, folder.path().join("demo"), "a folder, whatever its name");

    sources.models = ["a=/b@1", "a=/b@2", "c=d@cpu"].map(|text| text.parse().unwrap()).into();
    let config = from_sources(&sources).unwrap();
    assert_eq!(config.models[0].path, PathBuf::from("/b"));
    assert_eq!(config.models[0].context, Some(4096), "what is not an argument stays");
    let devices: Vec<_> = config.models[0].replicas.iter().map(|replica| replica.device.clone()).collect();
    assert_eq!(devices, [Some(Selector::Index(1)), Some(Selector::Index(2))], "the same name twice is two replicas");
    assert_eq!(config.models[3], Model::new("c", "d", Some(Selector::Cpu)));

    sources.models = ["c=/d", "c=/e"].map(|text| text.parse().unwrap()).into();
    let error = from_sources(&sources).unwrap_err().to_string();
    assert!(error.contains("models[4].name must differ from models[3].name"), "{error}");
}

/// Goal: environment variables override the file. Method: a child process reads the configuration, because this
/// process's environment is shared by all tests.
#[test]
fn the_environment_goes_over_the_file() {
    const CHILD: &str = "CONFIG_TEST_CHILD";
    if std::env::var_os(CHILD).is_some() {
        let (_folder, mut sources) =
            write("[server]\nlisten = \"127.0.0.1:1\"\nqueue_limit = 7\n[telemetry]\notlp_endpoint = \"http://c:0\"");
        sources.environment = true;
        match from_sources(&sources) {
            Ok(config) => {
                println!("listen {} queue {}", config.server.listen, config.server.queue_limit);
                println!("key {:?}", config.server.tls.map(|tls| tls.key));
                println!("spans to {:?}", config.telemetry.otlp_endpoint);
            }
            Err(error) => println!("error {error}"),
        }
        return;
    }
    let run = |variables: &[(&str, &str)]| {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "config::the_environment_goes_over_the_file", "--nocapture"])
            .env(CHILD, "1")
            .envs(variables.iter().copied())
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let text = run(&[("OSTINATO_SERVER__LISTEN", "127.0.0.1:2"), ("OSTINATO_OTHER", "x")]);
    assert!(text.contains("listen 127.0.0.1:2 queue 7"), "{text}");
    let text = run(&[("OSTINATO_SERVER__TLS__KEY", "/k"), ("OSTINATO_SERVER__TLS__CERTIFICATE", "/c")]);
    assert!(text.contains("key Some(\"/k\")"), "{text}");
    let text = run(&[("OSTINATO_SERVER__QUEUE_LIMIT", "many"), ("OSTINATO_SERVER__X", "1")]);
    assert!(text.contains("server.queue_limit") && text.contains("\"many\""), "{text}");
    assert!(text.contains("server.x is not a key"), "{text}");
    assert!(text.contains("OSTINATO_"), "the source is said: {text}");
    // Standard variables come between both.
    let standard = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:1");
    assert!(run(&[standard]).contains("spans to Some(\"http://c:1\")"));
    let text = run(&[standard, ("OSTINATO_TELEMETRY__OTLP_ENDPOINT", "http://c:2")]);
    assert!(text.contains("spans to Some(\"http://c:2\")"), "{text}");
    let text = run(&[standard, ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"), ("OSTINATO_SERVER__X", "1")]);
    assert!(
        text.contains("OTEL_EXPORTER_OTLP_PROTOCOL must be grpc, is http/json") && text.contains("2 problems"),
        "{text}"
    );
}

/// Goal: a placement over several devices that cannot be is refused with the rule that it breaks.
#[test]
fn wrong_splits_are_refused_with_their_rules() {
    let at = |placement: &str| format!("[[models]]\nname = \"m\"\npath = \"/m\"\nreplicas = [{placement}]");
    let good = read(&at(r#"{ devices = ["0000:17:00.0", "RTX 4090"], split = "layers" }"#)).expect("it is good");
    assert_eq!(good.models[0].replicas[0].devices.len(), 2);
    for (placement, key, rule) in [
        (r#"{ devices = ["a", "b"] }"#, "devices", "needs split = \"layers\""),
        (r#"{ devices = ["a"], split = "layers" }"#, "split", "at least two devices"),
        (r#"{ device = "a", split = "layers" }"#, "split", "at least two devices"),
        (r#"{ device = "a", devices = ["b", "c"], split = "layers" }"#, "device", "must not be given together"),
        (r#"{ devices = ["a", "b", "a"], split = "layers" }"#, "devices", "must name each device once"),
        (r#"{ devices = ["a", "b"], split = "layers", shares = [1] }"#, "shares", "as there are devices, 2"),
        (r#"{ devices = ["a", "b"], split = "layers", shares = [1, 0] }"#, "shares", "above 0"),
        (r#"{ device = "a", shares = [1] }"#, "shares", "as there are devices, 0"),
        (r#"{ devices = ["a", "b"], split = "tensor", shares = [1, 2] }"#, "shares", "equal parts"),
    ] {
        let found = problems(&at(placement));
        let key = format!("models[0].replicas[0].{key}");
        assert!(
            found.iter().any(|problem| problem.key == key && problem.rule.contains(rule)),
            "{placement}: {found:?}"
        );
    }
    let error = read(&at(r#"{ devices = ["a", "b"], split = "rows" }"#)).expect_err("rows");
    assert!(error.to_string().contains("\"rows\" is not a way to split"), "{error}");
    let text = format!("{}\nkv_memory = \"1GiB\"", at(r#"{ devices = ["a", "b"], split = "layers" }"#));
    assert!(
        problems(&text).iter().any(|problem| problem.key == "models[0].kv_memory" && problem.rule.contains("kv_pages"))
    );
}

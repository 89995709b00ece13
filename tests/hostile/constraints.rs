//! Constraints that are small to send and expensive to process: chains of references, cycles, products and repetitions,
//! in every form and through both gRPC contracts. Each must be followed, or refused with a reason, within the limits of
//! the worker processes, and processing must stop when its call has ended.

use crate::arena::{Arena, Attack, Bounds, Random, Setup, Target, runtime};
use ostinato::service::proto::constraint::{Choice, Kind};
use ostinato::service::proto::vllm::grpc::engine as contract;
use ostinato::service::proto::vllm::grpc::engine::vllm_engine_client::VllmEngineClient;
use ostinato::service::proto::{self, generate_request::Prompt};
use std::time::{Duration, Instant};
use tonic::{Code, Status};

/// The attacks that can be combined.
pub const ATTACKS: &[Attack] = &[("constraints", mixed)];

/// Memory limit of a worker process, MiB: the 512 MiB that it may use beyond its initial memory, its stack and its
/// program.
const WORKER_MIB: u64 = 512 + 64 + 192;
/// Time limit of an answer. Compiling may take two seconds of processor time and a mask as much, on a machine that is
/// busy with other work.
const ANSWERED: Duration = Duration::from_secs(60);

fn lark_chain(links: usize) -> String {
    let links: String = (0..links).map(|i| format!("a{i}: a{}\n", i + 1)).collect();
    format!("start: a0\n{links}a{}: \"x\"\n", links.lines().count())
}

fn terminal_chain(links: usize) -> String {
    let chain: String = (0..links).map(|i| format!("A{i}: A{}\n", i + 1)).collect();
    format!("start: A0\n{chain}A{links}: \"x\"\n")
}

fn ebnf_chain(links: usize) -> String {
    let chain: String = (0..links).map(|i| format!("a{i} ::= a{}\n", i + 1)).collect();
    format!("root ::= a0\n{chain}a{links} ::= \"x\"\n")
}

/// Returns a schema with a chain of definitions: `link` makes each from a reference to the next.
fn schema_chain(links: usize, link: impl Fn(&str) -> String) -> String {
    let definitions = (0..links).map(|i| format!("\"d{i}\":{}", link(&format!("{{\"$ref\":\"#/$defs/d{}\"}}", i + 1))));
    let definitions: Vec<String> = definitions.chain([format!("\"d{links}\":{{\"type\":\"null\"}}")]).collect();
    format!("{{\"$ref\":\"#/$defs/d0\",\"$defs\":{{{}}}}}", definitions.join(","))
}

fn properties(count: usize, required: bool) -> String {
    let names: Vec<String> = (0..count).map(|i| format!("\"p{i}\"")).collect();
    if required {
        return format!("{{\"type\":\"object\",\"required\":[{}]}}", names.join(","));
    }
    let properties: Vec<String> = names.iter().map(|name| format!("{name}:{{}}")).collect();
    format!("{{\"type\":\"object\",\"properties\":{{{}}}}}", properties.join(","))
}

/// Returns named constraints. With `scale` 1 their size is about that which ended a server whose threads have a stack
/// of 2 MiB.
pub fn payloads(scale: usize) -> Vec<(String, Kind)> {
    let (grammar, schema) = (Kind::Grammar, Kind::JsonSchema);
    let tag = |content: String| {
        Kind::StructuralTag(format!(
            "{{\"type\":\"structural_tag\",\"format\":{{\"type\":\"tag\",\"begin\":\"<\",\"content\":{content},\"end\":\">\"}}}}"
        ))
    };
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let forms: Vec<(&str, Kind)> = vec![
        ("lark rules in a chain", grammar(lark_chain(700 * scale))),
        ("lark terminals in a chain", grammar(terminal_chain(900 * scale))),
        ("ebnf rules in a chain", grammar(ebnf_chain(700 * scale))),
        ("lark rules in a circle", grammar(lark_chain(700 * scale).replace(": \"x\"", ": a0 | \"x\""))),
        ("items of $ref", schema(schema_chain(280 * scale, |next| format!("{{\"type\":\"array\",\"items\":{next}}}")))),
        ("allOf of $ref", schema(schema_chain(370 * scale, |next| format!("{{\"allOf\":[{next}]}}")))),
        ("$ref of $ref", schema(schema_chain(670 * scale, str::to_owned))),
        ("anyOf of two $ref", schema(schema_chain(40 * scale, |next| format!("{{\"anyOf\":[{next},{next}]}}")))),
        ("required names", schema(properties(7_000 * scale, true))),
        ("optional properties", schema(properties(7_000 * scale, false))),
        ("optional letters", Kind::Regex("a?".repeat(15_000 * scale))),
        ("a second mask that takes long", Kind::Regex(format!("x{}", "a?".repeat(8_000 * scale)))),
        ("optional letters in a repetition", Kind::Regex(format!("(a?){{{}}}", 5_000 * scale))),
        ("a terminal's repetition", grammar("start: \"a\"~1000000".to_owned())),
        ("a rule's repetition", grammar("start: a~1000000\na: \"a\" | \"b\"".to_owned())),
        ("the largest repetition", Kind::Regex("a{4294967295}".to_owned())),
        ("a repetition of repetitions", Kind::Regex("(a{1000}){1000}".to_owned())),
        ("three repetitions", Kind::Regex("((a{1,100}){1,100}){1,100}".to_owned())),
        ("ebnf repetition", grammar("root ::= \"a\"{1000000}".to_owned())),
        ("minLength", schema("{\"type\":\"string\",\"minLength\":100000000}".to_owned())),
        ("minItems", schema("{\"type\":\"array\",\"items\":{\"type\":\"null\"},\"minItems\":100000000}".to_owned())),
        ("large numbers", schema("{\"type\":\"integer\",\"minimum\":1,\"maximum\":1e300}".to_owned())),
        ("multipleOf", schema("{\"type\":\"integer\",\"multipleOf\":99999989}".to_owned())),
        ("alternatives", Kind::Regex(format!("({}x)*", "(a|b|ab|ba)*".repeat(60 * scale)))),
        ("and of regexes", grammar("start: A\nA: /(.*a.{20})/ & /(.*b.{19})/ & /(.*c.{18})/".to_owned())),
        ("not of a regex", grammar("start: A\nA: ~/.*(a|b).{24}/".to_owned())),
        ("choices", Kind::Choice(Choice { texts: (0..1_000).map(|i| format!("{i}{}", "x".repeat(250))).collect() })),
        ("a tag's grammar", tag(format!("{{\"type\":\"grammar\",\"grammar\":{}}}", quoted(&lark_chain(700 * scale))))),
        ("a tag's regex", tag(format!("{{\"type\":\"regex\",\"pattern\":{}}}", quoted(&"a?".repeat(15_000))))),
    ];
    forms.into_iter().map(|(name, kind)| (format!("{name} x{scale}"), kind)).collect()
}

fn ours(kind: Kind) -> proto::GenerateRequest {
    proto::GenerateRequest {
        prompt: Some(Prompt::Text("give me".to_owned())),
        sampling: Some(proto::Sampling { temperature: Some(1.0), seed: Some(5), ..Default::default() }),
        stopping: Some(proto::Stopping { max_tokens: Some(3), ..Default::default() }),
        constraint: Some(proto::Constraint { kind: Some(kind), ..Default::default() }),
        ..Default::default()
    }
}

fn theirs(kind: Kind) -> contract::GenerateRequest {
    use contract::sampling_params::Constraint;
    let constraint = match kind {
        Kind::JsonSchema(text) => Constraint::JsonSchema(text),
        Kind::Regex(text) => Constraint::Regex(text),
        Kind::Grammar(text) => Constraint::Grammar(text),
        Kind::Choice(choice) => Constraint::Choice(contract::ChoiceConstraint { choices: choice.texts }),
        Kind::JsonObject(_) => Constraint::JsonObject(true),
        Kind::StructuralTag(text) => Constraint::StructuralTag(text),
    };
    let tokens = contract::TokenizedInput { original_text: String::new(), input_ids: vec![40, 41, 42] };
    contract::GenerateRequest {
        input: Some(contract::generate_request::Input::Tokenized(tokens)),
        sampling_params: Some(contract::SamplingParams {
            max_tokens: Some(3),
            temperature: Some(1.0),
            constraint: Some(constraint),
            ..Default::default()
        }),
        ..Default::default()
    }
}

async fn ask_ours(target: &Target, kind: Kind) -> Result<(), Status> {
    let mut client = target.client(None).await.map_err(|error| Status::unavailable(error.to_string()))?;
    let mut stream = client.generate(ours(kind)).await?.into_inner();
    while stream.message().await?.is_some() {}
    Ok(())
}

async fn ask_theirs(target: &Target, kind: Kind) -> Result<(), Status> {
    let channel = target.channel().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let mut stream = VllmEngineClient::new(channel).generate(theirs(kind)).await?.into_inner();
    while stream.message().await?.is_some() {}
    Ok(())
}

/// Returns a problem unless the constraint was followed, or refused as invalid, within the time limit.
fn check(name: &str, result: Result<(), Status>, took: Duration) -> Option<String> {
    eprintln!(
        "{name}: {:.2} s, {:?}",
        took.as_secs_f64(),
        result.as_ref().map_err(|status| (status.code(), status.message()))
    );
    match result {
        Err(status) if status.code() != Code::InvalidArgument => Some(format!("{name}: {status:?}")),
        Err(status) if status.message().contains("panic") => Some(format!("{name}: {status:?}")),
        _ if took > ANSWERED => Some(format!("{name}: {took:?}")),
        _ => None,
    }
}

/// Returns the process ids of a server's workers.
fn workers(server: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{server}/task")).into_iter().flatten().flatten();
    let children = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    children.flat_map(|ids| ids.split_whitespace().filter_map(|id| id.parse().ok()).collect::<Vec<u32>>()).collect()
}

/// Returns the processor time of a process, and of its children that have ended, in clock ticks.
fn processor_time(id: u32) -> Option<(u64, u64)> {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // After the name, which may hold any character: user and system time, of the process and of its children.
    let fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11).take(4);
    let fields = fields.map(|field| field.parse().ok()).collect::<Option<Vec<u64>>>()?;
    let [user, system, user_of_children, system_of_children] = fields[..] else { return None };
    Some((user + system, user_of_children + system_of_children))
}

/// Returns the processor time of a server's living workers, in clock ticks.
fn ticks(server: u32) -> u64 {
    workers(server).into_iter().filter_map(processor_time).map(|(own, _)| own).sum()
}

/// Returns the processor time of all workers that a server has had.
fn spent(server: u32) -> Duration {
    let ended = processor_time(server).expect("it runs").1;
    let ticks_per_second = rustix::param::clock_ticks_per_second();
    Duration::from_millis((ended + ticks(server)) * 1000 / ticks_per_second)
}

/// Measures the peak memory of any of a server's workers, MiB.
struct Heights {
    stop: std::sync::mpsc::Sender<()>,
    thread: std::thread::JoinHandle<u64>,
}

impl Heights {
    fn watch(server: u32) -> Heights {
        let (stop, stopped) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let mut most = 0;
            loop {
                most =
                    workers(server).into_iter().map(|id| crate::arena::Memory::of(id).peak >> 10).fold(most, u64::max);
                match stopped.recv_timeout(Duration::from_millis(20)) {
                    Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
                    _ => return most,
                }
            }
        });
        Heights { stop, thread }
    }

    fn most(self) -> u64 {
        drop(self.stop);
        self.thread.join().expect("it only reads")
    }
}

fn mixed(target: &Target, random: &mut Random) {
    let payloads = payloads(1 + random.below(3) as usize);
    runtime().block_on(async {
        for _ in 0..3 {
            let (name, kind) = payloads[random.below(payloads.len() as u64) as usize].clone();
            let begun = Instant::now();
            let result =
                if random.below(2) == 0 { ask_ours(target, kind).await } else { ask_theirs(target, kind).await };
            match result {
                // The limits may be used up by other concurrent attacks.
                Err(status) if status.code() == Code::ResourceExhausted => {}
                result => {
                    let problem = check(&name, result, begun.elapsed() / 4);
                    assert!(problem.is_none(), "{problem:?}");
                }
            }
        }
    });
}

/// Returns a problem if a constraint that was refused for its time was not refused at the default limit, which the server
/// of these tests has, with both numbers; `used` is the processor time that workers have used for its call.
fn check_time(name: &str, status: &Status, used: Duration) -> Option<String> {
    let refused = "it takes more than 2.0 s of processor time, the most that it may take";
    // The call may have had a mask before, which was in time, and the well-behaved client's template is rendered too.
    let within = Duration::from_millis(1_900)..Duration::from_millis(2 * 2_000 + 1_000);
    match status.message().contains(refused) && within.contains(&used) {
        true => None,
        false => Some(format!("{name}: {status:?} after {used:?} of processor time, 2 s are allowed")),
    }
}

/// Goal: no constraint ends the server or exceeds its limits, which are the defaults. Method: every form through both
/// contracts, at the size that once ended the server, and in longer runs also at three times that size.
#[test]
fn no_constraint_ends_the_server_or_takes_more_than_it_may() {
    let arena = Arena::enter(Setup::default());
    let target = arena.target();
    let heights = Heights::watch(target.id);
    let (mut problems, mut timed) = (Vec::new(), 0);
    runtime().block_on(async {
        let scales: &[usize] = if crate::number("OSTINATO_HOSTILE_SECONDS", 10) > 60 { &[1, 3] } else { &[1] };
        for &scale in scales {
            for (name, kind) in payloads(scale) {
                let (begun, before) = (Instant::now(), spent(target.id));
                let result = ask_ours(&target, kind.clone()).await;
                if let Err(status) = &result
                    && status.message().contains("of processor time")
                {
                    timed += 1;
                    eprintln!("{name}: {:?}", spent(target.id) - before);
                    problems.extend(check_time(&name, status, spent(target.id) - before));
                }
                problems.extend(check(&name, result, begun.elapsed()));
                let begun = Instant::now();
                let result = ask_theirs(&target, kind).await;
                problems.extend(check(&format!("{name}, as routers ask"), result, begun.elapsed()));
            }
        }
    });
    let most = heights.most();
    eprintln!("a worker had at most {most} MiB");
    if most > WORKER_MIB {
        problems.push(format!("a worker had {most} MiB, at most {WORKER_MIB} are allowed"));
    }
    if timed == 0 {
        problems.push("no constraint has met the limit of processor time".to_owned());
    }
    assert!(problems.is_empty(), "{}\n{}", problems.join("\n"), arena.log());
    let seen = arena.leave(Bounds { gap: Duration::from_secs(20), ..Bounds::default() });
    eprintln!("{seen:?}");
}

/// Goal: compilation for a call ends with the call, whether its client has left or its deadline has passed.
#[test]
fn nothing_is_compiled_for_a_call_that_has_ended() {
    // The worker's time limit is so long that only the end of the call can end the work.
    let arena = Arena::enter(Setup {
        server: "worker_seconds = 600\nworker_memory = \"16GiB\"\n".to_owned(),
        ..Setup::default()
    });
    let target = arena.target();
    let long = || ours(Kind::Regex("a?".repeat(60_000)));
    runtime().block_on(async {
        let mut client = target.client(None).await.expect("a connection");
        let left = tokio::time::timeout(Duration::from_millis(1_500), client.generate(long())).await;
        assert!(left.is_err(), "{left:?}");
        let mut request = tonic::Request::new(long());
        request.set_timeout(Duration::from_millis(1_500));
        let status = client.generate(request).await.expect_err("its deadline");
        assert!(matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled), "{status:?}");
    });
    // The call with the passed deadline has been answered, so the server has noticed its end.
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        let before = ticks(target.id);
        std::thread::sleep(Duration::from_millis(500));
        // Allows for the rendering of the well-behaved client's chat template.
        if ticks(target.id) < before + 20 {
            break;
        }
        assert!(Instant::now() < until, "workers go on: {before} and {} ticks", ticks(target.id));
    }
    arena.leave(Bounds { gap: Duration::from_secs(20), ..Bounds::default() });
}

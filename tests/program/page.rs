//! Tests of the admin page in a real browser: every view in both themes, in a desktop and a phone viewport, with
//! keyboard only; while requests run, while a model loads, and after the server is gone. Screenshots are kept in
//! `page/` in the folder for files of tests. The browser's console must stay empty.

use crate::browser::Browser;
use crate::serving::{Served, fake, generate, model, serve_models, text_request, tokenizer};
use ostinato::engine::fake::FakeConfig;
use ostinato::host::Host;
use ostinato::host::progress::{Progress, Unit};
use ostinato::service::admin::{self, Admin};
use ostinato::service::proto;
use ostinato::service::server::Options;
use serde_json::json;
use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

/// A request id that would run a script if it were interpreted as markup.
const EVIL: &str = "<img src=x onerror=\"document.body.dataset.broken=1\">";

struct Page {
    admin: Arc<Admin>,
    url: String,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

async fn page() -> Page {
    let admin = Admin::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let stop = CancellationToken::new();
    let task = tokio::spawn(admin::serve(Arc::clone(&admin), listener, stop.clone()));
    Page { admin, url, stop, task }
}

/// Serves two models on two devices, one of them on both.
async fn host() -> Served {
    let fast = || fake(Duration::from_millis(3), b"Once upon a time there was a fox. ");
    let slow = fake(Duration::from_millis(7), b"42 ");
    let stories = model("stories", Some(tokenizer(true)), vec![(0, fast()), (1, fast())], 16);
    let sums = model("sums", Some(tokenizer(true)), vec![(1, slow)], 16);
    serve_models(vec![stories, sums], Options::default()).await
}

/// Keeps several kinds of requests running until it is told to stop.
fn load(served: &Served, stop: &Arc<AtomicBool>) -> Vec<tokio::task::JoinHandle<()>> {
    let ask = |name: &'static str, model: &'static str, prompt: usize, tokens: u32, pause: u64| {
        let (address, stop) = (served.address.clone(), Arc::clone(stop));
        tokio::spawn(async move {
            let mut client = proto::ostinato_client::OstinatoClient::connect(address).await.unwrap();
            let mut round = 0;
            while !stop.load(Ordering::Relaxed) {
                let mut request = text_request(model, &"a word ".repeat(prompt), tokens);
                request.request_id = format!("{name}-{round}");
                round += 1;
                let outcome = crate::serving::generate(&mut client, request).await;
                assert!(outcome.error.is_none(), "{:?}", outcome.error);
                tokio::time::sleep(Duration::from_millis(pause)).await;
            }
        })
    };
    vec![
        ask("story", "stories", 60, 400, 40),
        ask("tale", "stories", 200, 150, 200),
        ask("poem", "stories", 20, 250, 90),
        ask(EVIL, "sums", 30, 120, 30),
        ask("sum", "sums", 90, 60, 100),
        ask("product", "sums", 10, 200, 0),
    ]
}

/// Checks the rules for every view at every size: no horizontal overflow, sufficient contrast, and a name for
/// everything that takes keyboard focus.
#[track_caller]
fn fits(browser: &mut Browser, what: &str) {
    let wide = browser.eval("[document.documentElement.scrollWidth, innerWidth]");
    assert!(wide[0].as_u64() <= wide[1].as_u64(), "{what} is wider than its window: {wide}");
    // The contrast of text against the nearest painted background behind it must be at least 4.5:1, or 3:1 for large
    // text.
    let faint = browser.eval(
        r#"(() => {
            const parse = (c) => { const m = c.match(/[\d.]+/g).map(Number); return { rgb: m.slice(0, 3), a: m[3] ?? 1 }; };
            const light = (rgb) => rgb.map((v) => v / 255).map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
                .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
            const faint = [];
            for (const element of document.querySelectorAll("body *")) {
                const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
                const box = element.getBoundingClientRect();
                if (!own || box.width < 2 || !element.checkVisibility() || element.closest(".out, .skip, noscript")) continue;
                let ground = element;
                while (ground && parse(getComputedStyle(ground).backgroundColor).a === 0) ground = ground.parentElement;
                const style = getComputedStyle(element);
                const [a, b] = [style.color, getComputedStyle(ground ?? document.documentElement).backgroundColor].map((c) => light(parse(c).rgb));
                const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
                const large = parseFloat(style.fontSize) >= 24;
                if (ratio < (large ? 3 : 4.5)) faint.push(`${element.tagName} ${element.textContent.slice(0, 30)} ${ratio.toFixed(2)}`);
            }
            return faint;
        })()"#,
    );
    assert_eq!(faint, json!([]), "{what}");
    let nameless = browser.eval(
        r#"[...document.querySelectorAll("button, select, canvas, [tabindex='0']")]
            .filter((e) => e.checkVisibility() && !(e.textContent.trim() || e.getAttribute("aria-label") || e.labels?.length))
            .map((e) => e.outerHTML)"#,
    );
    assert_eq!(nameless, json!([]), "{what}: everything that takes the keyboard has a name");
}

/// Returns the runtime of the servers. The browser is driven from the test's own thread.
fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

#[test]
fn every_view_shows_a_host_at_work() {
    let runtime = runtime();
    let (served, page) = runtime.block_on(async { (host().await, page().await) });
    page.admin.line("memory of \"stories/0\" on Fake Apple");
    page.admin.set_endpoint(served.address.trim_start_matches("http://").parse().unwrap());
    page.admin.set_host(Arc::clone(&served.host));
    let mut browser = Browser::start();
    browser.size(1280, 800, false);
    browser.theme("light");
    browser.open(&page.url);
    nothing_runs(&mut browser);
    let stop = Arc::new(AtomicBool::new(false));
    let clients = {
        let _context = runtime.enter();
        load(&served, &stop)
    };
    numbers_move(&mut browser, &served.host);
    timeline_moves(&mut browser);
    transfers_and_waits_are_drawn(&mut browser);
    boxes_are_found_and_saved(&mut browser);
    requests_are_text(&mut browser);
    a_request_opens(&mut browser);
    ended_requests_fold_on_a_phone(&mut browser);
    the_history_is_drawn(&mut browser, &served.host);
    keyboard_alone(&mut browser);
    every_size_and_theme(&mut browser);
    assert_eq!(browser.complaints, Vec::<String>::new());
    stop.store(true, Ordering::Relaxed);
    runtime.block_on(async {
        for client in clients {
            client.await.unwrap();
        }
        page.stop.cancel();
        page.task.await.unwrap();
    });
}

fn nothing_runs(browser: &mut Browser) {
    browser.until("document.body.dataset.view === 'overview' && !document.querySelector('#idle').hidden");
    let command = browser.text("#idle-command");
    assert!(command.starts_with("ostinato generate --server http://127.0.0.1:"), "{command}");
    assert!(command.contains("--model stories"), "with several models one is named: {command}");
    assert_eq!(browser.text("#status"), "serving");
    for name in ["stories", "sums", "Fake Apple", "Fake Banana", "stories/1"] {
        assert!(browser.text("#overview").contains(name), "{name}");
    }
    fits(browser, "nothing runs");
    browser.screenshot("overview-idle-light");
    browser.eval("location.hash = '#timeline'");
    browser.until("!document.querySelector('#chart-empty').hidden");
    assert_eq!(browser.text("#chart-empty"), "Nothing has run on this device yet.");
    browser.eval("location.hash = '#requests'");
    browser.until("document.querySelector('#requests').checkVisibility()");
    assert!(browser.text("#running-none").contains("No request runs"));
    browser.eval("location.hash = '#overview'");
}

fn numbers_move(browser: &mut Browser, host: &Host) {
    browser.until("Number(document.body.dataset.rate) > 20 && Number(document.body.dataset.running) >= 3");
    browser.until("document.querySelector('#idle').hidden");
    browser.until("document.querySelector('#first-token-sub').textContent.startsWith('p50')");
    browser.until("document.querySelector('[data-replica=\"sums/0\"]').dataset.running === '2'");
    // The page's counts equal the host's.
    browser.until("known.steps.size === 3 && [...known.steps.values()].every((kept) => kept.steps.length > 20)");
    for replica in host.replicas() {
        let told = browser.eval(&format!("known.steps.get({:?}).steps.map((s) => [s.number, s.tokens])", replica.name));
        let told: HashMap<u64, u32> = serde_json::from_value::<Vec<(u64, u32)>>(told).unwrap().into_iter().collect();
        let steps = replica.steps_from(0);
        let both: Vec<_> = steps.iter().filter(|step| told.contains_key(&step.number)).collect();
        assert!(both.len() > 10, "{}: {} of {} steps", replica.name, both.len(), told.len());
        assert!(both.iter().all(|step| told[&step.number] == step.tokens));
        let numbers: Vec<u64> = told.keys().copied().collect();
        let span = numbers.iter().max().unwrap() - numbers.iter().min().unwrap() + 1;
        assert_eq!(span, numbers.len() as u64, "none is missed");
    }
    let before = browser.eval("document.body.dataset.polls").as_str().unwrap().parse::<u64>().unwrap();
    browser.until(&format!("Number(document.body.dataset.polls) > {}", before + 1));
}

fn timeline_moves(browser: &mut Browser) {
    browser.eval("location.hash = '#timeline'");
    browser.until("Number(document.querySelector('#chart').dataset.drawn) > 10");
    let data = |browser: &mut Browser, name: &str| {
        let value = browser.eval(&format!("document.querySelector('#chart').dataset.{name}"));
        value.as_str().unwrap().to_owned()
    };
    let number = |browser: &mut Browser, name: &str| data(browser, name).parse::<f64>().unwrap();
    assert_eq!(data(browser, "live"), "true");
    let from = number(browser, "from");
    browser.until(&format!("Number(document.querySelector('#chart').dataset.from) > {from}"));
    let sum = browser.text("#chart-sum");
    assert!(sum.contains("readback") && sum.contains("compute queue busy"), "{sum}");

    // The other device has two replicas and shows lanes for both.
    browser.eval("(() => { const s = document.querySelector('#device'); s.value = '1'; s.dispatchEvent(new Event('change')); })()");
    browser.until("chart.lanes.filter((lane) => lane.id.startsWith('engine ')).length === 2");

    // Zooming with the wheel keeps the position under the pointer; dragging moves the chart; both stop live following.
    browser.eval("document.querySelector('#live').click()");
    browser.until("document.querySelector('#chart').dataset.live === 'false'");
    let place = browser.eval("(() => { const r = document.querySelector('#chart').getBoundingClientRect(); return [r.x + r.width / 4, r.y + 120, r.width]; })()");
    let place: Vec<f64> = serde_json::from_value(place).unwrap();
    let (x, y, width) = (place[0], place[1], place[2]);
    let (from, span) = (number(browser, "from"), number(browser, "span"));
    browser.mouse("mouseWheel", x, y, json!({ "deltaX": 0, "deltaY": -200 }));
    browser.until(&format!("Number(document.querySelector('#chart').dataset.span) < {}", span * 0.9));
    let (closer, closer_span) = (number(browser, "from"), number(browser, "span"));
    assert!(
        ((from + span / 4.0) - (closer + closer_span / 4.0)).abs() < span * 0.01,
        "the place under the pointer stays"
    );
    browser.mouse("mousePressed", x, y, json!({ "button": "left", "buttons": 1, "clickCount": 1 }));
    browser.mouse("mouseMoved", x + width / 4.0, y, json!({ "button": "left", "buttons": 1 }));
    browser.mouse("mouseReleased", x + width / 4.0, y, json!({ "button": "left", "clickCount": 1 }));
    browser.until(&format!(
        "Math.abs(Number(document.querySelector('#chart').dataset.from) - {}) < {}",
        closer - closer_span / 4.0,
        closer_span * 0.02
    ));
    // Zooming with two fingers.
    let fingers = |x0: f64, x1: f64| json!([{ "x": x0, "y": y, "id": 1 }, { "x": x1, "y": y, "id": 2 }]);
    browser.call("Input.dispatchTouchEvent", json!({ "type": "touchStart", "touchPoints": fingers(x, x + 80.0) }));
    browser.call("Input.dispatchTouchEvent", json!({ "type": "touchMove", "touchPoints": fingers(x, x + 160.0) }));
    browser.call("Input.dispatchTouchEvent", json!({ "type": "touchEnd", "touchPoints": [] }));
    browser.until(&format!("Number(document.querySelector('#chart').dataset.span) < {}", closer_span * 0.7));
    browser.until("chart.pointers.size === 0");

    // The element under the pointer is described, and a clicked element stays selected.
    browser.eval("(() => { const s = document.querySelector('#device'); s.value = '0'; s.dispatchEvent(new Event('change')); chart.span = 60000; })()");
    // On a busy machine nothing may have run in the last 60 ms, so the window moves on until it has a box.
    let spot = "(() => { chart.follow(true); chart.follow(false); const box = chart.boxes.findLast((b) => b.lane === 'compute' && b.end < chart.from + chart.span && b.begin > chart.from);
        const lane = chart.lanes.find((l) => l.id === 'compute'); const r = chart.canvas.getBoundingClientRect();
        return window.spot = box && [r.x + ((box.begin + box.end) / 2 - chart.from) / chart.span * r.width, r.y + lane.y + 8]; })()";
    browser.until(spot);
    let spot: Vec<f64> = serde_json::from_value(browser.eval("window.spot")).unwrap();
    browser.mouse("mouseMoved", spot[0], spot[1], json!({}));
    browser.until("document.querySelector('#detail-title').textContent.startsWith('Region ')");
    let facts = browser.text("#detail-facts");
    assert!(facts.contains("Flush") && facts.contains("estimated"), "{facts}");
    browser.mouse("mousePressed", spot[0], spot[1], json!({ "button": "left", "buttons": 1, "clickCount": 1 }));
    browser.mouse("mouseReleased", spot[0], spot[1], json!({ "button": "left", "clickCount": 1 }));
    browser.until("document.querySelector('#chart').dataset.chosen.includes('region')");
    browser.mouse("mouseMoved", 2.0, 2.0, json!({}));
    assert!(browser.text("#detail-title").starts_with("Region "));
    fits(browser, "timeline");
    browser.screenshot("timeline-chosen-light");
}

/// Method: fake devices have no transfer queue, so records of transfers are inserted into the page's copy of the
/// server's data. They are added to the lists that the page holds: an answer of the server that is on its way is added
/// to the same lists, and would replace a list put in their place.
fn transfers_and_waits_are_drawn(browser: &mut Browser) {
    browser.eval(
        "(() => {
            chart.follow(false);
            const steps = known.steps.get('stories/0').steps;
            const step = structuredClone(steps.at(-1));
            const t = steps.at(-1).taken;
            Object.assign(step, { number: 1e9, phase: 'prefill', rows: 640, steps: 1, planned: t + 500, taken: t + 16000 });
            const submission = step.submissions[0];
            step.submissions = [submission];
            Object.assign(submission, {
                enqueue: [t + 900, t + 1100], seen: t + 15500, flush: 'cross_queue',
                point: { queue: 'compute', value: 4711 }, waits: [{ queue: 'transfer', value: 17 }],
            });
            submission.regions = [
                { name: 'patch.0', runs: 1, begin: t + 7000, end: t + 7400, kernels: 0 },
                { name: 'prefill.640', runs: 1, begin: t + 7400, end: t + 14000, kernels: 0 },
                { name: 'head.1', runs: 1, begin: t + 14000, end: t + 15200, kernels: 0 },
            ];
            steps.push(step);
            known.transfers.get(0).transfers.push(...[0, 1, 2].map((n) => ({
                number: n, what: n ? 'copy' : 'readback', bytes: 3e6 * (n + 1), copies: n + 1, waits: [],
                enqueue: [t + 1300 + 300 * n, t + 1500 + 300 * n], begin: t + 1800 + 1800 * n, end: t + 3500 + 1800 * n,
                seen: t + 3600 + 1800 * n, clock: { quality: 'calibrated', error_us: 0.7 }, point: { queue: 'transfer', value: 15 + n },
            })));
            chart.collect();
            chart.span = 20000;
            chart.from = t - 3000;
            chart.choose(chart.boxes.find((box) => box.key.endsWith('1000000000 0 region 1')));
        })()",
    );
    browser.until("document.querySelector('#detail-title').textContent === 'Region prefill.640'");
    let facts = browser.text("#detail-facts");
    assert!(
        facts.contains("transfer 17") && facts.contains("cross queue") && facts.contains("compute 4711"),
        "{facts}"
    );
    browser.screenshot("timeline-transfers-light");
    browser.eval("chart.canvas.focus()");
    browser.key("ArrowDown", false);
    browser.key("ArrowDown", false);
    assert!(browser.text("#detail-said").contains("handed to the driver"));
    browser.key("ArrowDown", false);
    let said = browser.text("#detail-said");
    assert!(said.starts_with("Transfer: ") && said.contains("MiB"), "{said}");
    browser.eval(
        "(() => {
            const { steps } = known.steps.get('stories/0');
            steps.splice(steps.findIndex((step) => step.number === 1e9), 1);
            known.transfers.clear();
            chart.collect();
        })()",
    );
}

fn requests_are_text(browser: &mut Browser) {
    browser.eval("location.hash = '#requests'");
    browser.until("document.querySelectorAll('#running tbody tr').length >= 4");
    browser.until("document.querySelectorAll('#ended tbody tr').length >= 6");
    browser.until("document.querySelector('#running tr[data-phase=decode]')");
    let shown = browser.text("#requests");
    assert!(shown.contains(EVIL), "{shown}");
    assert_eq!(browser.eval("document.body.dataset.broken ?? null"), json!(null));
    assert_eq!(browser.eval("document.querySelectorAll('main img').length"), 0);
    // The output count of a running request grows in the table.
    let output = "[...document.querySelectorAll('#running tbody tr')].map((r) => r.cells[0].textContent + r.cells[4].textContent).join()";
    let before = browser.eval(output);
    browser.until(&format!("{output} !== {before}"));
}

/// Searches the timeline for a request, and saves the trace.
fn boxes_are_found_and_saved(browser: &mut Browser) {
    browser.eval("location.hash = '#timeline'");
    browser.until("chart.boxes.some((box) => box.step?.requests.some((id) => id.startsWith('story-')))");
    browser.eval("const find = $('find'); find.value = 'STORY-'; find.dispatchEvent(new Event('input'))");
    browser.until("chart.found.length > 0 && chart.found.length < chart.boxes.length");
    let wrong = "chart.found.filter((box) => ![box.label, ...(box.step?.requests ?? [])].some((text) => text.includes('story-'))).length";
    assert_eq!(browser.eval(wrong), 0);
    assert!(browser.text("#find-count").ends_with("boxes"));
    browser.eval("$('find').focus()");
    browser.key("Enter", false);
    browser.until("chart.found.some((box) => box.key === chart.chosen) && !chart.live");
    let first = browser.eval("chart.chosen");
    browser.key("Enter", false);
    browser.until(&format!("chart.chosen !== {first}"));
    assert!(browser.text("#find-count").contains(" of "));
    browser.screenshot("timeline-found-light");
    // The trace is what a download has; the browser of the test saves none.
    browser.eval("URL.createObjectURL = (file) => { window.saved = file; return 'data:,'; }");
    browser.eval("$('save').click()");
    browser.until("window.saved");
    let trace = browser.eval("window.saved.text()");
    let trace: serde_json::Value = serde_json::from_str(trace.as_str().unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let boxes: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
    assert!(
        boxes.len() > 20 && boxes.iter().all(|of| of["ts"].is_number() && of["tid"].is_number()),
        "{}",
        boxes.len()
    );
    assert!(boxes.iter().any(|of| of["name"].as_str().unwrap().starts_with("decode.")));
    browser.eval("$('find').value = ''; $('find').dispatchEvent(new Event('input'))");
}

/// Opens an ended request: its facts, and its place on the timeline.
fn a_request_opens(browser: &mut Browser) {
    let id = browser.eval("known.ended.findLast((request) => request.id.startsWith('tale-')).id");
    let id = id.as_str().unwrap();
    browser.eval(&format!("openRequest({id:?})"));
    browser.until("document.querySelector('#request').checkVisibility()");
    assert_eq!(browser.text("#request-title"), id);
    let facts = browser.text("#request-facts");
    for name in ["Replicastories/", "Output tokens150", "First token", "Tracenot exported"] {
        assert!(facts.contains(name), "{facts}");
    }
    fits(browser, "an open request");
    browser.screenshot("request-light");
    browser.eval("$('request-timeline').click()");
    browser.until("document.body.dataset.view === 'timeline' && chart.found.length > 0");
    let inside = "chart.found.some((box) => box.end > chart.from && box.begin < chart.from + chart.span)";
    browser.until(inside);
    browser.eval(
        "$('find').value = ''; $('find').dispatchEvent(new Event('input')); chart.lane = null; chart.follow(true)",
    );
    browser.eval("location.hash = '#requests'");
    browser.eval("$('request-close').click()");
    browser.until("document.querySelector('#request').hidden");
}

/// An ended request is one line on a phone. It unfolds by a tap and by the keyboard, and stays while others end. A
/// desktop has the table.
fn ended_requests_fold_on_a_phone(browser: &mut Browser) {
    browser.eval("location.hash = '#requests'");
    for theme in ["dark", "light"] {
        browser.theme(theme);
        browser.size(390, 844, true);
        browser.until("document.querySelectorAll('#ended-lines details').length >= 6");
        assert_eq!(browser.eval("document.querySelector('#ended').checkVisibility()"), false);
        let lines = browser.eval(
            "[...document.querySelectorAll('#ended-lines summary')].map((line) => {
                const request = known.ended.find((request) => endedKey(request) === line.parentElement.key);
                const wanted = request.id + request.model + words(request.error ?? request.reason) + length(request.whole);
                const right = Math.max(...[...line.children].map((part) => part.getBoundingClientRect().right));
                const narrow = [...line.children].some((part) => part.getBoundingClientRect().width < 24);
                return [line.parentElement.offsetHeight, right, narrow, line.textContent === wanted];
            })",
        );
        for line in lines.as_array().unwrap() {
            assert!(line[0].as_f64().unwrap() <= 48.0, "one line: {lines}");
            assert!(line[1].as_f64().unwrap() <= 390.0 && line[2] == false, "within the screen: {lines}");
            assert_eq!(line[3], true, "id, model, end and time: {lines}");
        }
        assert_eq!(browser.eval("document.documentElement.scrollWidth <= 390"), true);
        fits(browser, &format!("folded requests, {theme}"));
        browser.screenshot(&format!("requests-folded-{theme}"));

        unfold_by_tap(browser);
        browser.until("document.querySelector('#ended-lines details[open] dd')");
        let facts = browser.text("#ended-lines details[open] .facts");
        assert!(facts.contains("Output tokens") && facts.contains("First token"), "{facts}");
        assert!(!browser.eval("document.querySelector('#request').checkVisibility()").as_bool().unwrap());
        // Others end until it is none of the last ones.
        let key = "document.querySelector('#ended-lines details[open]').key";
        let open = browser.eval(key);
        browser.until(&format!("known.ended.findLastIndex((r) => endedKey(r) === {open}) < known.ended.length - FEW"));
        browser.until(&format!(
            "document.querySelectorAll('#ended-lines details').length === FEW + 1 && {key} === {open}"
        ));
        assert_eq!(browser.eval("document.documentElement.scrollWidth <= 390"), true);
        fits(browser, &format!("an unfolded request, {theme}"));
        browser.screenshot(&format!("requests-unfolded-{theme}"));
        browser.eval("document.querySelector('#ended-lines details[open] summary').click()");
        browser.until("!document.querySelector('#ended-lines details[open]') && unfolded.size === 0");
    }
    // With the keyboard alone: unfold, fold, and from an unfolded line to the timeline.
    browser.eval("document.activeElement.blur()");
    browser.tab_to("#ended-lines summary");
    assert_eq!(browser.eval("getComputedStyle(document.activeElement).outlineStyle"), "solid");
    for open in [true, false, true] {
        browser.key("Enter", false);
        browser.until(&format!("document.activeElement.parentElement.open === {open}"));
    }
    browser.key("Tab", false);
    assert_eq!(browser.eval("document.activeElement.textContent"), "Show on the timeline");
    browser.key("Enter", false);
    browser.until("document.body.dataset.view === 'timeline' && chart.found.length > 0");
    browser.eval(
        "$('find').value = ''; $('find').dispatchEvent(new Event('input')); chart.lane = null; chart.follow(true)",
    );
    browser.eval("location.hash = '#requests'");
    browser.size(1280, 800, false);
    browser.until("document.querySelectorAll('#ended tbody tr').length >= 6 && document.querySelector('#ended').checkVisibility()");
    assert_eq!(browser.eval("document.querySelectorAll('#ended-lines details').length"), 0);
    assert_eq!(browser.eval("document.querySelector('#ended-lines').checkVisibility()"), false);
}

/// Taps a folded line. What is above the lines may grow between the look for a line and the tap, which then misses.
fn unfold_by_tap(browser: &mut Browser) {
    for _ in 0..10 {
        let place = browser.eval(
            "(() => { const line = document.querySelectorAll('#ended-lines summary')[2]; line.scrollIntoView({ block: 'center' });
            const box = line.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()",
        );
        let touch = json!([{ "x": place[0], "y": place[1] }]);
        browser.call("Input.dispatchTouchEvent", json!({ "type": "touchStart", "touchPoints": touch }));
        browser.call("Input.dispatchTouchEvent", json!({ "type": "touchEnd", "touchPoints": [] }));
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(50));
            if browser.eval("document.querySelectorAll('#ended-lines details[open]').length") == 1 {
                return;
            }
        }
    }
    panic!("a tap unfolds no line");
}

/// The charts show what the server sampled.
fn the_history_is_drawn(browser: &mut Browser, host: &Host) {
    browser.eval("location.hash = '#history'");
    browser.until("past.samples.filter((sample) => sample.output_tokens > 0 && sample.ended > 0).length >= 2");
    browser.until("document.querySelectorAll('#plots canvas').length === 8");
    browser.until(
        "[...document.querySelectorAll('#plots canvas')].every((canvas) => Number(canvas.dataset.samples) >= 2)",
    );
    browser.until("Number(document.querySelector('#plot-output canvas').dataset.largest) > 20");
    let sampled = browser.eval("past.samples.reduce((sum, sample) => sum + sample.output_tokens, 0)").as_u64().unwrap();
    let drawn: u64 = host.replicas().map(|of| of.totals()).map(|of| of.prefill.tokens + of.decode.tokens).sum();
    assert!(0 < sampled && sampled <= drawn, "{sampled} of {drawn}");
    assert!(browser.eval("past.samples.at(-1).first_token.p95 >= past.samples.at(-1).first_token.p50") == true);
    // The fakes take 3 and 7 ms a step, so the gaps of their streams are of that order, not of whole requests.
    browser.until("past.samples.filter((sample) => sample.gap !== null).length >= 2");
    let gaps = browser.eval("past.samples.filter((sample) => sample.gap).map(({ gap }) => [gap.p50, gap.p95])");
    let gaps: Vec<(f64, f64)> = serde_json::from_value(gaps).unwrap();
    assert!(gaps.iter().all(|(p50, p95)| 1e3 < *p50 && p50 <= p95 && *p50 < 1e6), "microseconds: {gaps:?}");
    browser.until("Number(document.querySelector('#plot-gap canvas').dataset.largest) > 1000");
    let said = browser.text("#plot-gap .sub");
    assert!(said.contains("p50 ") && said.contains("p95 "), "{said}");
    let named = browser.eval("document.querySelector('#plot-gap canvas').getAttribute('aria-label')");
    assert!(named.as_str().unwrap().starts_with("Gap between tokens, the last 60 minutes"), "{named}");
    browser.eval("document.querySelector('#plot-first canvas').focus()");
    browser.key("ArrowLeft", false);
    let said = browser.text("#plot-first .sub");
    assert!(said.contains("ago: p50 ") && said.contains("p95 "), "{said}");
    browser.eval("$('range').value = '120'; $('range').dispatchEvent(new Event('change'))");
    fits(browser, "the history");
    browser.screenshot("history-light");
}

fn keyboard_alone(browser: &mut Browser) {
    let focus = |browser: &mut Browser| browser.eval("getComputedStyle(document.activeElement).outlineStyle");
    browser.eval("location.hash = '#overview'");
    browser.eval("document.activeElement.blur()");
    browser.tab_to(".skip");
    assert_eq!(focus(browser), "solid");
    browser.tab_to("nav a[href='#requests']");
    assert_eq!(focus(browser), "solid", "who has the focus is seen");
    browser.key("Enter", false);
    browser.until("document.body.dataset.view === 'requests' && document.querySelector('nav a[aria-current]').hash === '#requests'");
    browser.eval("document.activeElement.blur()");
    browser.tab_to("nav a[href='#timeline']");
    browser.key("Enter", false);
    browser.until("document.body.dataset.view === 'timeline'");
    browser.tab_to("#live");
    browser.tab_to("#chart");
    browser.key("Escape", false);
    browser.until("document.querySelector('#chart').dataset.chosen === ''");
    browser.key("ArrowRight", false);
    browser.until("document.querySelector('#chart').dataset.chosen !== ''");
    assert_eq!(browser.text("#live"), "Paused", "what is looked at does not run away");
    let chosen = |browser: &mut Browser| browser.eval("chart.chosen").as_str().unwrap().to_owned();
    let first = chosen(browser);
    browser.key("ArrowLeft", false);
    let second = chosen(browser);
    assert_ne!(first, second);
    browser.key("ArrowRight", false);
    assert_eq!(chosen(browser), first);
    let said = browser.text("#detail-said");
    assert!(said.starts_with("Region ") && said.contains("Took"), "{said}");
    browser.key("ArrowUp", false);
    assert!(browser.text("#detail-said").contains("handed to the driver"));
    browser.key("ArrowUp", false);
    assert!(browser.text("#detail-said").starts_with("Plan "));
    browser.key("ArrowDown", false);
    browser.key("ArrowDown", false);
    browser.key("ArrowDown", false);
    assert!(browser.text("#detail-said").contains("is seen"));
    let span = |browser: &mut Browser| browser.eval("chart.span").as_f64().unwrap();
    let whole = span(browser);
    browser.key("+", false);
    assert!((span(browser) - whole / 2.0).abs() < 1.0);
    browser.key("-", false);
    assert!((span(browser) - whole).abs() < 1.0);
    let from = browser.eval("chart.from").as_f64().unwrap();
    browser.key("ArrowLeft", true);
    assert!((browser.eval("chart.from").as_f64().unwrap() - (from - whole / 4.0)).abs() < 1.0);
    browser.key("ArrowUp", false);
    browser.key("Enter", false);
    assert!(span(browser) < whole, "the box fills the window");
    browser.key(" ", false);
    browser.until("document.querySelector('#live').getAttribute('aria-pressed') === 'true'");
    browser.eval("chart.span = 400000");
    browser.tab_to("summary");
    browser.key("Enter", false);
    browser.until("!document.querySelector('#timeline details').open");
    browser.key("Enter", false);
}

fn every_size_and_theme(browser: &mut Browser) {
    for (size, width, height, phone) in [("desk", 1280, 800, false), ("phone", 360, 740, true)] {
        browser.size(width, height, phone);
        for theme in ["light", "dark"] {
            browser.theme(theme);
            for view in ["overview", "chat", "history", "timeline", "requests"] {
                browser.eval(&format!("location.hash = '#{view}'"));
                browser.until(&format!("document.body.dataset.view === '{view}'"));
                let polls = browser.eval("document.body.dataset.polls").as_str().unwrap().parse::<u64>().unwrap();
                browser.until(&format!("Number(document.body.dataset.polls) > {}", polls + 1));
                fits(browser, &format!("{view}, {size}, {theme}"));
                browser.screenshot(&format!("{view}-{size}-{theme}"));
            }
        }
    }
}

#[test]
fn a_model_that_loads_and_a_server_that_is_gone_are_shown() {
    let runtime = runtime();
    let (served, page) = runtime.block_on(async { (host().await, page().await) });
    let mut browser = Browser::start();
    browser.size(1280, 800, false);
    browser.open(&page.url);
    browser.until("document.body.dataset.view === 'loading'");
    assert_eq!(browser.text("#loading-what"), "Opening devices");
    page.admin
        .line("memory of \"stories/0\" on Fake Apple\n  weights    15.3 GiB\n  kv pages  153.0 MiB  <b>68</b> pages");
    page.admin.step("loading weights", 3 << 30, 15 << 30, Unit::Bytes);
    browser.until("document.querySelector('#loading-progress').value === 3 * 2 ** 30");
    assert_eq!(browser.text("#loading-what"), "Loading weights");
    std::thread::sleep(Duration::from_millis(700));
    page.admin.step("loading weights", 9 << 30, 15 << 30, Unit::Bytes);
    browser.until("document.querySelector('#loading-progress').value === 9 * 2 ** 30");
    let numbers = browser.text("#loading-numbers");
    assert!(numbers.starts_with("9.0 GiB of 15.0 GiB") && numbers.ends_with(" left"), "{numbers}");
    let lines = browser.text("#loading-lines");
    assert!(lines.contains("weights    15.3 GiB\n") && lines.contains("<b>68</b>"), "{lines}");
    for theme in ["light", "dark"] {
        browser.theme(theme);
        fits(&mut browser, "loading");
        browser.screenshot(&format!("loading-desk-{theme}"));
    }
    browser.size(360, 740, true);
    fits(&mut browser, "loading on a phone");
    browser.screenshot("loading-phone-dark");
    browser.size(1280, 800, false);

    page.admin.set_host(Arc::clone(&served.host));
    browser.until("document.body.dataset.view === 'overview'");
    assert_eq!(browser.complaints, Vec::<String>::new());
    served.host.drain();
    browser.until("document.querySelector('#status').textContent === 'draining'");

    let address = page.url.trim_start_matches("http://").trim_end_matches('/').to_owned();
    page.stop.cancel();
    runtime.block_on(page.task).unwrap();
    browser.until("!document.querySelector('#gone').hidden");
    assert!(browser.text("#gone").contains("does not answer"));
    for theme in ["light", "dark"] {
        browser.theme(theme);
        fits(&mut browser, "gone");
        assert_eq!(browser.text("#status"), "gone", "whatever is drawn anew");
        browser.screenshot(&format!("gone-desk-{theme}"));
    }

    // Another server at the same address: the page shows it and discards the data of the first server.
    let admin = Admin::new();
    admin.set_host(Arc::new(Host::new(vec![model("other", None, vec![(2, fake(Duration::from_millis(1), b"x"))], 4)])));
    let stop = CancellationToken::new();
    let listener = runtime.block_on(TcpListener::bind(&address)).unwrap();
    let again = runtime.spawn(admin::serve(admin, listener, stop.clone()));
    browser.until(
        "document.querySelector('#gone').hidden && document.querySelector('#models').textContent.includes('other')",
    );
    assert!(!browser.text("#models").contains("stories"));
    stop.cancel();
    runtime.block_on(again).unwrap();
    // The browser logs each request that fails, whatever the page does. There must be no other message.
    assert!(!browser.complaints.is_empty(), "what the console says is heard");
    let other: Vec<&String> =
        browser.complaints.iter().filter(|line| !line.contains("net::ERR_") || !line.contains("/api/")).collect();
    assert!(other.is_empty(), "{other:?}");
}

/// Returns the UUID of lavapipe.
fn lavapipe() -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_ostinato")).args(["devices", "--json"]).output().unwrap();
    let devices: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap();
    let found = devices.iter().find(|device| device["name"].as_str().unwrap().contains("llvmpipe")).unwrap();
    found["uuid"].as_str().unwrap().to_owned()
}

/// A process that is killed when its test ends.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Goal: the page works with the real program. Method: the program on a CPU driver with the embedded model, which has a
/// real memory plan and real regions.
#[test]
fn the_program_serves_the_page() {
    crate::common::layer();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ostinato.toml");
    let place = format!("path = \"embedded:demo\"\nreplicas = [{{ device = \"{}\" }}]", lavapipe());
    let models = format!(
        "[[models]]\nname = \"demo\"\n{place}\n[[models]]\nname = \"spare\"\nload = \"request\"\nlisten = \"127.0.0.1:0\"\n{place}"
    );
    std::fs::write(&file, models).unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_ostinato"))
        .args(["serve", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--config"])
        .arg(&file)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let mut program = Program(child);
    let mut output = BufReader::new(program.0.stdout.take().unwrap());
    let mut line = |prefix: &str| {
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        line.strip_prefix(prefix).unwrap_or_else(|| panic!("{line:?}")).trim().to_owned()
    };
    let address = line("listening on ");
    let url = line("admin on ");
    let mut browser = Browser::start();
    browser.size(1280, 800, false);
    browser.theme("light");
    browser.open(&url);
    browser.until("document.querySelectorAll('#devices .barline i').length > 2");
    let memory = browser.text("#devices");
    assert!(memory.contains("llvmpipe") && memory.contains("weights") && memory.contains("kv pages"), "{memory}");
    // What `check-device` says of the device.
    assert!(memory.contains("weights row after row, many rows multiplied in f32"), "{memory}");
    browser.eval("document.querySelector('#devices .lacks').open = true");
    let lacks = browser.text("#devices .lacks");
    assert!(lacks.contains("a GPU: a CPU driver is for tests"), "{lacks}");
    fits(&mut browser, "overview with what a device lacks");
    assert!(browser.text("#start-lines").contains("memory of \"demo/0\""));
    assert!(browser.text("#idle-command").contains(&address));
    // A model that is loaded on request is shown with the command that loads it.
    assert_eq!(browser.text("#models h3"), "demo");
    let spare = browser.text("#apart");
    assert!(spare.contains("not loaded") && spare.contains("load spare"), "{spare}");
    // The only served model is what a contract that names none means.
    let contracts = browser.text("[data-contracts=demo]");
    assert!(contracts.contains(&format!("vllm.grpc.engine for routers at {address}")), "{contracts}");
    fits(&mut browser, "overview with a model that is not loaded");
    browser.screenshot("overview-spare-light");
    let loaded = Command::new(env!("CARGO_BIN_EXE_ostinato"))
        .args(["models", "--server", &address, "load", "spare"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(loaded.success());
    browser.until(
        "document.querySelectorAll('#models h3').length === 2 && !document.querySelector('#apart').checkVisibility()",
    );
    // Of several, one with an address of its own.
    let contracts = browser.text("[data-contracts=spare]");
    assert!(contracts.contains("vllm.grpc.engine for routers at 127.0.0.1:"), "{contracts}");
    let contracts = browser.text("[data-contracts=demo]");
    assert!(contracts.contains("vllm.grpc.engine for routers is off"), "{contracts}");
    assert!(contracts.contains("OpenAI’s API on port "), "{contracts}");
    let status = Command::new(env!("CARGO_BIN_EXE_ostinato"))
        .args([
            "generate",
            "--model",
            "demo",
            "--server",
            &address,
            "--prompt",
            "Once upon a time",
            "--max-tokens",
            "48",
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    browser.eval("location.hash = '#timeline'");
    browser.until("chart.boxes.some((box) => box.lane === 'compute' && box.label.startsWith('decode.1'))");
    // The weights went through the transfer queue.
    browser.until("chart.boxes.some((box) => box.what === 'transfer' && box.transfer.bytes > 1e6)");
    // The work of a submission on the device lies between the time it was enqueued and the time its end was seen,
    // within the error of the clock.
    let outside = browser.eval(
        "chart.submissions.filter(({ submission: s }) => s.regions.length && s.clock).filter(({ submission: s }) =>
            s.regions[0].begin < s.enqueue[0] - s.clock.error_us - 1 || s.regions.at(-1).end > s.seen + s.clock.error_us + 1).length",
    );
    assert_eq!(outside, 0);
    fits(&mut browser, "timeline of a CPU driver");
    browser.screenshot("timeline-program-light");
    browser.eval("location.hash = '#overview'");
    browser.until("!document.querySelector('#rate').textContent.startsWith('–') && document.querySelector('#overview').checkVisibility()");
    browser.screenshot("overview-program-light");
    a_conversation(&mut browser);
    assert_eq!(browser.complaints, Vec::<String>::new());
    let id = program.0.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    assert_eq!(program.0.wait().unwrap().code(), Some(0));
}

/// Talks to the model through the endpoint of OpenAI's API, which has another origin than the page.
fn a_conversation(browser: &mut Browser) {
    browser.eval("location.hash = '#chat'");
    browser.until("document.querySelector('#chat-main').checkVisibility()");
    let models = browser.eval("[...document.querySelectorAll('#chat-model option')].map((option) => option.value)");
    assert_eq!(models, json!(["demo", "spare"]));
    browser.eval("$('chat-temperature').value = '0'; $('chat-max').value = '24'; $('chat-text').focus()");
    browser.eval("$('chat-text').value = 'Tell me of <b>a fox</b>.'");
    browser.key("Enter", false);
    browser.until("document.querySelectorAll('#chat-log li').length === 2 && !chat.running");
    let said = browser.eval("[...document.querySelectorAll('#chat-log .words')].map((words) => words.textContent)");
    assert!(said.to_string().contains("<b>a fox</b>"), "what is said stays text: {said}");
    let facts = browser.text("#chat-log .assistant .sub");
    assert!(
        facts.contains("first token after") && facts.contains("tokens/s") && facts.contains("its request"),
        "{facts}"
    );
    let answer = browser.eval("chat.messages[1].content");
    assert!(answer.as_str().is_some_and(|answer| answer.len() > 10), "{answer}");
    browser.screenshot("chat-program-light");
    fits(browser, "a conversation");
    // The second question goes with what was said; an answer is stopped.
    browser.eval("$('chat-max').value = '400'; $('chat-text').value = 'And then?'; $('chat-send').click()");
    browser.until("chat.running && chat.messages.at(-1).content.length > 0");
    assert_eq!(browser.text("#chat-send"), "Stop");
    browser.eval("$('chat-send').click()");
    browser.until("!chat.running");
    assert!(browser.text("#chat-log li:last-child .sub").contains("stopped"));
    assert_eq!(
        browser.eval("chatBody().messages.map((message) => message.role).join()"),
        "user,assistant,user,assistant"
    );
    // A refusal is told in the server's words.
    browser.eval("$('chat-top-p').value = '5'; $('chat-text').value = 'Again'; $('chat-send').click()");
    browser.until("document.querySelector('#chat-log .failed')");
    let refusal = browser.text("#chat-log .failed");
    assert!(refusal.starts_with("400: ") && refusal.contains("top_p"), "{refusal}");
    // The browser notes each refused request.
    browser.complaints.retain(|line| !line.contains("400 (Bad Request)"));
    browser.eval("document.querySelector('#chat-log .assistant a').click()");
    browser.until("document.querySelector('#request').checkVisibility()");
    browser.until("document.querySelector('#request-facts').textContent.includes('Output tokens24')");
    browser.eval("location.hash = '#chat'; $('chat-new').click()");
    browser.until("document.querySelectorAll('#chat-log li').length === 0");
}

#[test]
fn a_warning_stands_above_every_view() {
    let runtime = runtime();
    let mut browser = Browser::start();
    let (served, page) = runtime.block_on(async {
        let faulty = FakeConfig { fault_every: Some(1), ..fake(Duration::from_millis(1), b"x") };
        let models = vec![model("faulty", Some(tokenizer(true)), vec![(0, faulty)], 4)];
        (serve_models(models, Options::default()).await, page().await)
    });
    page.admin.set_host(Arc::clone(&served.host));
    browser.size(1280, 800, false);
    browser.open(&page.url);
    browser.until("document.body.dataset.view === 'overview'");
    browser.until("document.querySelector('#warnings').hidden");
    runtime.block_on(async { generate(&mut served.client().await, text_request("faulty", "Hello", 20)).await });
    browser.until("!document.querySelector('#warnings').hidden");
    let warning = browser.text("#warnings");
    assert!(warning.starts_with("faulty/0: a kernel of a decode step timed out"), "{warning}");
    for (size, width, height) in [("desk", 1280, 800), ("phone", 360, 740)] {
        browser.size(width, height, size == "phone");
        for theme in ["light", "dark"] {
            browser.theme(theme);
            fits(&mut browser, &format!("a warning, {size}, {theme}"));
            browser.screenshot(&format!("warning-{size}-{theme}"));
        }
    }
    assert_eq!(browser.text("#status"), "serving");
    assert_eq!(browser.complaints, Vec::<String>::new());
}

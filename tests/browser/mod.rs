//! A headless Chromium with one page, driven over the DevTools protocol through pipes: JSON messages that end with a
//! zero byte. Console messages, log entries and uncaught exceptions of the page are collected.

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The browser of the Debian package, used unless the environment variable `CHROMIUM` names another.
const CHROMIUM: &str = "/usr/bin/chromium";
/// Time limit for the result of a command and for a condition. It is long because the machine may be busy with other
/// tests.
const PATIENCE: Duration = Duration::from_secs(60);

/// Allows one browser at a time, because each consists of several processes.
static ONE: Mutex<()> = Mutex::new(());

pub struct Browser {
    child: Child,
    commands: ChildStdin,
    messages: Receiver<Value>,
    session: Option<String>,
    last: u64,
    /// Console messages, log entries and uncaught exceptions.
    pub complaints: Vec<String>,
    /// The folder for screenshots.
    folder: PathBuf,
    _profile: tempfile::TempDir,
    _one: MutexGuard<'static, ()>,
}

impl Browser {
    pub fn start() -> Browser {
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let profile = tempfile::tempdir().unwrap();
        let chromium = std::env::var("CHROMIUM").unwrap_or_else(|_| CHROMIUM.to_owned());
        let log = std::fs::File::create(profile.path().join("log")).unwrap();
        // `--remote-debugging-pipe` reads commands from file descriptor 3 and writes messages to descriptor 4.
        let mut child = Command::new("bash")
            .args(["-c", "exec \"$@\" 3<&0 4>&1 1>&2", "--", &chromium, "--headless=new", "--no-sandbox"])
            .args(["--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage"])
            .args(["--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-pipe"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("about:blank")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        let commands = child.stdin.take().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let (sender, messages) = channel();
        std::thread::spawn(move || {
            loop {
                let mut message = Vec::new();
                match output.read_until(0, &mut message) {
                    Ok(read) if read > 0 && message.pop() == Some(0) => {}
                    _ => return,
                }
                if sender.send(serde_json::from_slice(&message).unwrap()).is_err() {
                    return;
                }
            }
        });
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("page");
        std::fs::create_dir_all(&folder).unwrap();
        let mut browser = Browser {
            child,
            commands,
            messages,
            session: None,
            last: 0,
            complaints: Vec::new(),
            folder,
            _profile: profile,
            _one: one,
        };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session = browser.call("Target.attachToTarget", attach)["sessionId"].as_str().unwrap().to_owned();
        browser.session = Some(session);
        for domain in ["Page", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    /// Sends a command and returns its result.
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        self.last += 1;
        let mut message = json!({ "id": self.last, "method": method, "params": params });
        if let Some(session) = &self.session {
            message["sessionId"] = session.as_str().into();
        }
        self.commands.write_all(message.to_string().as_bytes()).unwrap();
        self.commands.write_all(&[0]).unwrap();
        self.commands.flush().unwrap();
        let until = Instant::now() + PATIENCE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let message = self.messages.recv_timeout(left).unwrap_or_else(|error| panic!("{method}: {error}"));
            if message["id"] == self.last {
                assert!(message.get("error").is_none(), "{method}: {message}");
                return message["result"].clone();
            }
            self.note(&message);
        }
    }

    /// Records console messages, uncaught exceptions and log entries; ignores other events.
    fn note(&mut self, message: &Value) {
        let params = &message["params"];
        match message["method"].as_str() {
            Some("Runtime.consoleAPICalled") => {
                self.complaints.push(format!("console.{}: {}", params["type"], params["args"]));
            }
            Some("Runtime.exceptionThrown") => {
                self.complaints.push(format!("exception: {}", params["exceptionDetails"]))
            }
            Some("Log.entryAdded") => {
                let entry = &params["entry"];
                self.complaints.push(format!("log: {} {} {}", entry["source"], entry["text"], entry["url"]));
            }
            _ => {}
        }
    }

    /// Returns the value of a JavaScript expression evaluated in the page.
    #[track_caller]
    pub fn eval(&mut self, expression: &str) -> Value {
        let params = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let answer = self.call("Runtime.evaluate", params);
        assert!(answer.get("exceptionDetails").is_none(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    #[track_caller]
    pub fn text(&mut self, selector: &str) -> String {
        let value = self.eval(&format!("document.querySelector({selector:?})?.textContent ?? null"));
        value.as_str().unwrap_or_else(|| panic!("nothing is {selector}")).to_owned()
    }

    /// Waits until a JavaScript expression is true.
    #[track_caller]
    pub fn until(&mut self, expression: &str) {
        let until = Instant::now() + PATIENCE;
        while self.eval(&format!("Boolean({expression})")) != true {
            let body = if Instant::now() > until { self.eval("document.body.innerText") } else { Value::Null };
            assert!(Instant::now() < until, "never: {expression}; {:?}; {body}", self.complaints);
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    pub fn open(&mut self, url: &str) {
        let opened = self.call("Page.navigate", json!({ "url": url }));
        assert!(opened.get("errorText").is_none(), "{opened}");
        self.until("document.readyState === 'complete'");
    }

    /// Sets the size of the viewport in pixels. With `phone` it emulates a mobile device with a touch screen.
    pub fn size(&mut self, width: u32, height: u32, phone: bool) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone });
        self.call("Emulation.setDeviceMetricsOverride", size);
        self.call("Emulation.setTouchEmulationEnabled", json!({ "enabled": phone }));
    }

    pub fn theme(&mut self, theme: &str) {
        let features = json!([{ "name": "prefers-color-scheme", "value": theme }]);
        self.call("Emulation.setEmulatedMedia", json!({ "features": features }));
    }

    /// Presses and releases a key, named as in `KeyboardEvent.key`. A printable key and Enter also type a character.
    pub fn key(&mut self, key: &str, shift: bool) {
        let code = match key {
            "Tab" => 9,
            "Enter" => 13,
            "Escape" => 27,
            " " => 32,
            "End" => 35,
            "Home" => 36,
            "ArrowLeft" => 37,
            "ArrowUp" => 38,
            "ArrowRight" => 39,
            "ArrowDown" => 40,
            _ => 0,
        };
        let text = match key {
            "Enter" => "\r",
            key if key.chars().count() == 1 => key,
            _ => "",
        };
        let modifiers = if shift { 8 } else { 0 };
        for kind in ["keyDown", "keyUp"] {
            let mut event = json!({ "type": kind, "key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers });
            if kind == "keyDown" && !text.is_empty() {
                event["text"] = text.into();
            }
            self.call("Input.dispatchKeyEvent", event);
        }
    }

    /// Presses Tab until the focused element matches a selector.
    #[track_caller]
    pub fn tab_to(&mut self, selector: &str) {
        for _ in 0..60 {
            self.key("Tab", false);
            if self.eval(&format!("document.activeElement.matches({selector:?})")) == true {
                return;
            }
        }
        panic!("the keyboard does not come to {selector}");
    }

    pub fn mouse(&mut self, kind: &str, x: f64, y: f64, more: Value) {
        let mut event = json!({ "type": kind, "x": x, "y": y });
        for (name, value) in more.as_object().unwrap() {
            event[name] = value.clone();
        }
        self.call("Input.dispatchMouseEvent", event);
    }

    /// Saves a screenshot of the whole page, including what lies outside the viewport, as `NAME.png` in the test's
    /// output folder.
    pub fn screenshot(&mut self, name: &str) -> PathBuf {
        let shot = self.call("Page.captureScreenshot", json!({ "format": "png", "captureBeyondViewport": true }));
        let path = self.folder.join(format!("{name}.png"));
        std::fs::write(&path, base64(shot["data"].as_str().unwrap())).unwrap();
        path
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        self.session = None;
        // On `Browser.close` Chromium ends its child processes itself. It is killed if it has not exited after 10
        // seconds.
        let _ = self.commands.write_all(b"{\"id\":0,\"method\":\"Browser.close\"}\0");
        let until = Instant::now() + Duration::from_secs(10);
        while Instant::now() < until {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn base64(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        other => panic!("{other} is no base64"),
    };
    let mut bytes = Vec::new();
    for group in text.trim_end_matches('=').as_bytes().chunks(4) {
        let bits = group.iter().fold(0u32, |bits, byte| bits << 6 | u32::from(digit(*byte))) << (6 * (4 - group.len()));
        bytes.extend(&bits.to_be_bytes()[1..group.len()]);
    }
    bytes
}

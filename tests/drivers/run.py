#!/usr/bin/env python3
"""Compiles every pipeline of some models with drivers of GPUs that are not there, and judges the result.

`install.sh` puts the drivers of a newer Mesa into target/drivers, with the libraries by which they run without hardware:
a driver compiles, and nothing executes. For each driver and model this runs `ostinato check-device --compile-only` under
the Khronos validation layer. It fails on a message of the layer, a pipeline that fails, one that takes longer than
MOST_SECONDS, and one that spills registers to memory, but for the exceptions in drivers.toml.

lavapipe is a CPU driver and executes too: with its matrices, the demo models must give the text that they give in f32.

    run.py [--full] [--driver NAME] [--model NAME] [--report FILE] [--program FILE]
"""

import argparse
import concurrent.futures
import fnmatch
import glob
import json
import os
import pathlib
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = ROOT / os.environ.get("CARGO_TARGET_DIR", "target")
FOLDER = TARGET / "drivers"
LIBRARIES = FOLDER / "root/usr/lib/x86_64-linux-gnu"
# The longest CPU time of one pipeline, in seconds: what else runs on the machine does not count.
MOST_SECONDS = 3.0
# The longest time of one check: a driver that never ends is stopped.
MOST_CHECK_SECONDS = 900
# A prompt of enough tokens for the kernels of many rows, in the style of the demo models' stories.
STORY = ("Tom had a red ball and a small dog. One day he went to the park with his dog. He threw the ball, and the dog ran "
         "after it. Then a big bird came. It took the ball and")
# Where the validation layer of Chromium may be.
LAYERS = ["/usr/lib/chromium", "/usr/lib/chromium-browser", "/opt/google/chrome"]


def layer(folder):
    """Writes the manifest of the validation layer that comes with Chromium, newer than the distribution's."""
    library = next((f"{at}/libVkLayer_khronos_validation.so" for at in LAYERS
                    if os.path.exists(f"{at}/libVkLayer_khronos_validation.so")), None)
    if library is None:
        sys.exit("tests/drivers: no validation layer: install chromium (deploy/setup.sh test)")
    extensions = ["VK_EXT_debug_report", "VK_EXT_debug_utils", "VK_EXT_validation_features", "VK_EXT_layer_settings"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "VkLayer_khronos_validation.json").write_text(json.dumps({
        "file_format_version": "1.2.0",
        "layer": {
            "name": "VK_LAYER_KHRONOS_validation",
            "type": "GLOBAL",
            "library_path": library,
            "api_version": "1.4.0",
            "implementation_version": "1",
            "description": "Khronos validation layer",
            "instance_extensions": [{"name": name, "spec_version": "1"} for name in extensions],
        },
    }))


def shim(driver):
    """Returns the library that stands for a driver's kernel part; None if the driver needs none."""
    return LIBRARIES / f"lib{driver['shim']}_noop_drm_shim.so" if "shim" in driver else None


def path_of(model, program):
    """Returns a model's path; writes its checkpoint first if it has none."""
    if "path" in model:
        return model["path"]
    folder = FOLDER / "models" / pathlib.Path(model["synth"]).stem
    if not (folder / "model.safetensors").exists():
        command = [program, "--quiet", "synth", "--config", model["synth"], "--out", str(folder)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return str(folder)


def run(driver, arguments, program):
    """Runs the program with a driver. Returns the ended process, or the reason why it was stopped."""
    # The drivers need their own C library, whose loader runs the program.
    preload = [FOLDER / "first.so"] + ([shim(driver)] if "shim" in driver else [])
    words = [LIBRARIES / "ld-linux-x86-64.so.2", "--library-path", LIBRARIES, "--preload",
             ":".join(str(library) for library in preload), program, "--quiet", *arguments,
             "--device", driver.get("device", "0")]
    variables = {
        "VK_DRIVER_FILES": str(FOLDER / "manifests" / f"{driver['manifest']}_icd.json"),
        "VK_LAYER_PATH": str(FOLDER / "layer"),
        # Times and statistics are those of a compiler that has kept nothing.
        "MESA_SHADER_CACHE_DISABLE": "true",
        "XDG_CACHE_HOME": str(FOLDER / "cache"),
        **driver.get("gpu", {}),
    }
    unwanted = ("VK_ICD_FILENAMES", "VK_INSTANCE_LAYERS", "VK_LAYER_SETTINGS_PATH", "LD_PRELOAD")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    try:
        return subprocess.run([str(word) for word in words], cwd=ROOT, env=environment | variables, capture_output=True,
                              text=True, timeout=MOST_CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        return f"it has not ended after {MOST_CHECK_SECONDS} s"


def texts(driver, path, program):
    """Returns a model's text in f32 and on matrix units, or the reason why there is none."""
    found = []
    for arithmetic in (0, 2):
        arguments = ["generate", "--model", path, "--prompt", STORY, "--max-tokens", "40"]
        arguments += ["--tune", f"arithmetic={arithmetic}"]
        done = run(driver, arguments, program)
        if isinstance(done, str):
            return done
        if done.returncode:
            return f"exit status {done.returncode}: {done.stderr.strip()[-600:]}"
        found.append(done.stdout)
    return found


def execute(driver, models, program):
    """Compares the texts of models on a driver that executes. Returns what is wrong."""
    wrong = []
    for model, path in models:
        if not model.get("text"):
            continue
        found = texts(driver, path, program)
        equal = not isinstance(found, str) and found[0] == found[1] and len(found[0]) > len("\n")
        print(f"{driver['name']:<16} {model['name']:<13} {'the text on matrix units is that in f32' if equal else found}")
        if not equal:
            wrong.append(f"{driver['name']} {model['name']}: texts in f32 and on matrix units: {found}")
    return wrong


def check(driver, model, path, program):
    """Runs one check. Returns its report, or the reason why it has no report."""
    arguments = ["check-device", "--compile-only", "--validation", "--json", "--model", path]
    if "tune" in model:
        arguments += ["--tune", model["tune"]]
    done = run(driver, arguments, program)
    if isinstance(done, str):
        return done
    try:
        return json.loads(done.stdout)
    except json.JSONDecodeError:
        ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        return f"{ended}, no report: {done.stderr.strip()[-600:]}"


class Exceptions:
    """The known exceptions of drivers.toml, and which of them were needed."""

    def __init__(self, listed):
        self.listed = listed
        self.used = set()

    def allow(self, driver, kernel, what, value):
        """Whether a value of a kernel, or the text of its error, is a known exception."""
        for index, entry in enumerate(self.listed):
            known = entry["what"] == what and fnmatch.fnmatch(driver, entry["driver"])
            if known and fnmatch.fnmatch(kernel, entry["kernel"]):
                if entry["says"] in value if what == "error" else value <= entry["most"]:
                    self.used.add(index)
                    return True
        return False


def judge(driver, report, exceptions):
    """Returns what is wrong with a report, one text for each kernel and kind."""
    if isinstance(report, str):
        return [report]
    wrong = []
    for test in report["tests"] or []:
        if test["result"] == "failed":
            wrong.append(f"{test['name']}: {test['detail']}")
    if report["device"]["reason"]:
        wrong.append(f"refused: {report['device']['reason']}")
    wrong += [f"validation: {message}" for message in report["validation"]]
    worst = {}
    for built in report["pipelines"] or []:
        kernel = built["kernel"]
        if built["error"]:
            if not exceptions.allow(driver["name"], kernel, "error", built["error"]):
                wrong.append(f"{kernel}: {built['error']}")
            continue
        for what, value, most in (("seconds", built["cpu_ms"] / 1e3, MOST_SECONDS), ("spills", built["spills"] or 0, 0)):
            if value > most and value > worst.get((kernel, what), (0,))[0]:
                worst[kernel, what] = (value, built["constants"])
    for (kernel, what), (value, constants) in worst.items():
        if not exceptions.allow(driver["name"], kernel, what, value):
            unit = "s of compile time" if what == "seconds" else "spills"
            wrong.append(f"{kernel}: {value:.4g} {unit}, with {constants}")
    return wrong


def line(driver, model, report):
    """Returns a line about a check."""
    name = f"{driver['name']:<16} {model['name']:<13}"
    if isinstance(report, str):
        return f"{name} no report"
    pipelines = report["pipelines"] or []
    slowest = max(pipelines, key=lambda built: built["cpu_ms"], default=None)
    known = [built for built in pipelines if built["spills"] is not None]
    spills = f"{sum(1 for built in known if built['spills'])} spill" if known else "spills not told"
    last = f"slowest {slowest['kernel']} {slowest['cpu_ms'] / 1e3:.2f} s" if slowest else ""
    seconds = sum(built["cpu_ms"] for built in pipelines) / 1e3
    return f"{name} {'+'.join(report['paths'] or []):<22} {len(pipelines):>4} in {seconds:>6.1f} s, {last}, {spills}"


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--full", action="store_true", help="also with the drivers and models marked as full")
    arguments.add_argument("--driver", help="only drivers whose name matches this pattern")
    arguments.add_argument("--model", help="only models whose name matches this pattern")
    arguments.add_argument("--report", type=pathlib.Path, help="write all reports to this file, as JSON")
    arguments.add_argument("--program", type=pathlib.Path, default=TARGET / "debug/ostinato")
    arguments.add_argument("--jobs", type=int, default=os.cpu_count())
    given = arguments.parse_args()
    listed = tomllib.loads((ROOT / "tests/drivers/drivers.toml").read_text())
    exceptions = Exceptions(listed.get("exception", []))

    def chosen(entries, pattern):
        wanted = [entry for entry in entries if given.full or pattern or not entry.get("full")]
        return [entry for entry in wanted if fnmatch.fnmatch(entry["name"], pattern or "*")]

    layer(FOLDER / "layer")
    program = str(given.program.resolve())
    drivers = chosen(listed["driver"], given.driver)
    absent = [driver for driver in drivers if shim(driver) and not shim(driver).exists()]
    drivers = [driver for driver in drivers if driver not in absent]
    for driver in absent:
        print(f"{driver['name']:<16} left out: {shim(driver).name} is not built", flush=True)
    models = [(model, path_of(model, program)) for model in chosen(listed["model"], given.model)]
    if not drivers or not models:
        sys.exit("tests/drivers: no driver or no model is left")
    pairs = [(driver, model, path) for driver in drivers for model, path in models]

    reports, wrong = [], []
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        checks = pool.map(lambda pair: check(*pair, program), pairs)
        for (driver, model, _), report in zip(pairs, checks):
            print(line(driver, model, report), flush=True)
            reports.append((driver, model, report))
    for driver in drivers:
        if driver.get("executes"):
            wrong += execute(driver, models, program)
    for driver, model, report in reports:
        found = judge(driver, report, exceptions)
        wrong += [f"{driver['name']} {model['name']}: {text}" for text in found]
    if given.report:
        given.report.write_text(json.dumps([
            {"driver": driver["name"], "model": model["name"], "report": report}
            for driver, model, report in reports
        ]))
    if given.full and not given.driver and not given.model and not absent:
        for index, entry in enumerate(exceptions.listed):
            if index not in exceptions.used:
                wrong.append(f"drivers.toml: the exception of {entry['kernel']} on {entry['driver']} was not needed")
    print(f"\n{len(reports)} checks, {len(wrong)} findings")
    for text in wrong:
        print(f"  {text}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Builds the tests and runs them, with as many processes at a time as there are cores.

`cargo test` runs one program after the other, so that cores idle while the last long test of each program runs, and
SwiftShader compiles on one thread per process. Here a process has the tests of one module, or one test where tests are
long and share nothing. What a process prints is shown if it fails. At the end a table shows the seconds of each program.
"""

import collections
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Programs of which each test is a process: their tests are long, and most compile shaders.
BY_TEST = ["kernels"]
# Programs that are one process, because their tests take turns or share what is started once.
WHOLE = ["ostinato", "bad_input", "engine", "hostile", "otlp", "traces"]
# Programs whose tests wait for other processes, or for limits of time: they run one after the other beside those that keep
# the cores busy.
WAITING = ["hostile", "program", "service", "otlp"]
# The others leave them the cores, so that their limits of time hold.
LATER = ["nice", "-n", "10"]
# What takes long begins first, so that no core idles at the end.
FIRST = ["model fallback", "model demo", "traces", "engine", "bad_input", "model", "device", "kernels"]

# Programs that compile far more shaders on lavapipe than they run: its compiler leaves out its optimizations.
COMPILING = ["kernels"]

# Runs a command on the lavapipe of target/drivers in place of the system's.
OVER = os.path.join(ROOT, "tests", "drivers", "over.sh")

# The processes that run now.
RUNNING = set()

Unit = collections.namedtuple("Unit", "program binary name tests")
Result = collections.namedtuple("Result", "unit passed seconds cpu")


def build():
    """Returns the pairs of a program's name and its path."""
    command = [*shlex.split(os.environ.get("CARGO", "cargo")), "test", "--locked", "--no-run"]
    messages = subprocess.run(
        [*command, "--message-format=json-render-diagnostics"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    if messages.returncode != 0:
        sys.exit(messages.returncode)
    found = [json.loads(line) for line in messages.stdout.splitlines() if line.startswith("{")]
    return [
        (message["target"]["name"], message["executable"])
        for message in found
        if message["reason"] == "compiler-artifact" and message["profile"]["test"] and message["executable"]
    ]


def listed(binary, *options):
    command = [binary, "--list", "--format", "terse", *options]
    lines = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    return [line.removesuffix(": test") for line in lines if line.endswith(": test")]


def units(program, binary):
    """Returns the processes of a program and the number of its tests that are ignored."""
    ignored = set(listed(binary, "--ignored"))
    groups = collections.defaultdict(list)
    for test in listed(binary):
        if test not in ignored:
            key = test if program in BY_TEST else "" if program in WHOLE else test.split("::")[0]
            groups[key].append(test)
    return [Unit(program, binary, name, tests) for name, tests in groups.items()], len(ignored)


def over():
    """Returns the words before a command that give it the newer lavapipe of target/drivers, if that is possible here."""
    if os.environ.get("OSTINATO_TEST_GPU"):
        return []
    possible = subprocess.run([OVER, "true"], cwd=ROOT, stderr=subprocess.DEVNULL).returncode == 0
    print("lavapipe is that of " + ("target/drivers" if possible else "the system"), flush=True)
    return [OVER] if possible else []


def run(unit, before):
    """Runs the tests of one process, with the words `before` before its command."""
    with tempfile.TemporaryFile() as output:
        begun = time.monotonic()
        environment = {**os.environ, "CARGO_MANIFEST_DIR": ROOT}
        if unit.program in COMPILING:
            environment.setdefault("GALLIVM_PERF", "nopt")
        if unit.program not in WAITING:
            # Each core has a process of its own, so lavapipe needs no threads besides the one that submits.
            environment.setdefault("LP_NUM_THREADS", "0")
        child = subprocess.Popen(
            [*before, *([] if unit.program in WAITING else LATER), unit.binary, "--exact", *unit.tests],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        RUNNING.add(child)
        _, status, usage = os.wait4(child.pid, 0)
        RUNNING.discard(child)
        child.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - begun
        output.seek(0)
        text = output.read().decode(errors="replace")
    # A test that is not run is a failure too.
    passed = re.search(r"^test result: ok\. (\d+) passed; 0 failed; 0 ignored", text, re.MULTILINE)
    passed = child.returncode == 0 and passed is not None and int(passed[1]) == len(unit.tests)
    cpu = usage.ru_utime + usage.ru_stime
    word = "ok" if passed else "FAILED"
    report = f"{word:6} {seconds:6.1f} s, {cpu:6.1f} s of CPU  {unit.program} {unit.name}\n"
    sys.stdout.write(report if passed else f"{report}exit status {child.returncode}\n{text}\n")
    sys.stdout.flush()
    return Result(unit, passed, seconds, cpu)


def main():
    wanted = sys.argv[1:]
    programs = [(program, binary) for program, binary in build() if not wanted or program in wanted]
    begun = time.monotonic()
    work, ignored = [], collections.Counter()
    for program, binary in programs:
        found, skipped = units(program, binary)
        ignored[program] += skipped
        work += found
    name = lambda unit: f"{unit.program} {unit.name}"
    # Each file and each folder with a main.rs is a program of its own.
    tests = pathlib.Path(ROOT, "tests")
    expected = {path.stem for path in tests.glob("*.rs")} | {path.parent.name for path in tests.glob("*/main.rs")}
    for program in (set(wanted) or expected | {"ostinato"}) - {unit.program for unit in work}:
        sys.exit(f"no test of {program} was found")
    work.sort(key=lambda unit: [not name(unit).startswith(first) for first in FIRST])
    before = over()
    print(f"running {sum(len(unit.tests) for unit in work)} tests in {len(work)} processes", flush=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as cores, ThreadPoolExecutor(1) as beside:
        runs = [(beside if unit.program in WAITING else cores).submit(run, unit, before) for unit in work]
        try:
            results = [done.result() for done in runs]
        except BaseException:
            for pool in (cores, beside):
                pool.shutdown(wait=False, cancel_futures=True)
            for child in list(RUNNING):
                child.terminate()
            raise
    print(f"\n{'program':12} tests  ignored  seconds  of CPU")
    for program in dict.fromkeys(program for program, _ in programs):
        own = [result for result in results if result.unit.program == program]
        tests = sum(len(result.unit.tests) for result in own)
        seconds, cpu = sum(result.seconds for result in own), sum(result.cpu for result in own)
        print(f"{program:12} {tests:5}  {ignored[program]:7}  {seconds:7.0f}  {cpu:6.0f}")
    failed = [result.unit for result in results if not result.passed]
    for unit in failed:
        print(f"FAILED: {name(unit)}")
    # In the words of `cargo test`, which tools that count tests know. A process that failed counts with all its tests.
    tests, wrong = (sum(len(unit.tests) for unit in some) for some in (work, failed))
    print(
        f"\ntest result: {'FAILED' if failed else 'ok'}. {tests - wrong} passed; {wrong} failed; "
        f"{sum(ignored.values())} ignored; 0 measured; 0 filtered out; finished in {time.monotonic() - begun:.2f}s"
    )
    sys.exit(1 if failed else 0)


def interrupt(*_):
    raise KeyboardInterrupt


signal.signal(signal.SIGTERM, interrupt)
main()

"""What faults.py, shapes.py and loads.py share: configurations of small models, checkpoints of them, and a program that serves them.

Python's standard library only. Checkpoints have random weights (`ostinato synth`) and the demo model's tokenizer, so that
their outputs can be asked for as text; its 2,048 tokens are the smallest vocabulary of such a checkpoint.
"""

import argparse
import json
import pathlib
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "demo/model"


def arguments(description):
    """Returns a parser with the arguments that scripts for one device share: the program, --device and --tune."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=lambda path: str(pathlib.Path(path).resolve()))
    parser.add_argument("--device")
    parser.add_argument("--tune", action="append", default=[])
    return parser


def dense(**change):
    """Returns the configuration of a dense model."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "hidden_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 384,
        "num_hidden_layers": 3, "vocab_size": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "max_position_embeddings": 131072, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, **change,
    }


def experts(**change):
    """Returns the configuration of a mixture of experts."""
    return dense(**{
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 64,
        "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "norm_topk_prob": True, "tie_word_embeddings": False, **change,
    })


def hybrid(**change):
    """Returns the configuration of a model with recurrent state: two of eight layers are attention."""
    text = {
        "model_type": "qwen3_5_moe_text", "attention_bias": False, "hidden_act": "silu", "hidden_size": 128,
        "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 8,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "vocab_size": 2048, "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.25,
                            "rope_theta": 10000000.0, "rope_type": "default"},
        "attn_output_gate": True, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16, "linear_num_key_heads": 8, "linear_num_value_heads": 16,
        "linear_value_head_dim": 16, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 96, **change,
    }
    return {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
            "text_config": text, "tie_word_embeddings": False}


def windows(**change):
    """Returns the configuration of experts in layers of which every other one has a short window."""
    path = ROOT / "tests/fixtures/families/gptoss-mxfp4/config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    config.update(num_hidden_layers=4, num_key_value_heads=2, intermediate_size=64, vocab_size=2048,
                  max_position_embeddings=131072,
                  bos_token_id=1, eos_token_id=2, pad_token_id=2)
    config.update(change)
    config["layer_types"] = ["sliding_attention", "full_attention"] * (config["num_hidden_layers"] // 2)
    return config


def branches(**change):
    """Returns the configuration of a model with norms behind mixers and MLPs; every other layer has a short window."""
    config = dense(**{
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 64, "rope_local_base_freq": 10000, "sliding_window": 48, "sliding_window_pattern": 2,
        "num_hidden_layers": 4, **change,
    })
    del config["hidden_act"]
    return config


def beside(**change):
    """Returns the configuration of experts beside dense MLPs, all with norms behind them, and heads of two sizes."""
    config = json.loads((ROOT / "tests/fixtures/families/gemma4-moe/config.json").read_text())
    text = config["text_config"]
    text.update(hidden_size=128, intermediate_size=96, num_hidden_layers=4, head_dim=64, global_head_dim=128,
                moe_intermediate_size=64, vocab_size=2048, vocab_size_per_layer_input=2048, sliding_window=48,
                max_position_embeddings=131072, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    text.update(change)
    text["layer_types"] = ["sliding_attention", "full_attention"] * (text["num_hidden_layers"] // 2)
    config["eos_token_id"] = [2]
    return config


def routed(**change):
    """Returns the configuration of experts that are chosen by sigmoids with a bias, with a shared one, and more than eight
    query heads a key head."""
    return dense(**{
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "moe_intermediate_size": 64,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "use_qk_norm": True,
        "num_attention_heads": 12, "num_key_value_heads": 1, "partial_rotary_factor": 0.5, "attention_bias": True,
        "tie_word_embeddings": False, **change,
    })


def checkpoint(program, config, folder, *options):
    """Writes a checkpoint, with further options of `synth`; raises CalledProcessError with the program's message if the
    configuration is refused."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    shape = folder.with_suffix(".json")
    shape.write_text(json.dumps(config, indent=1))
    command = [program, "synth", "--config", shape, "--out", folder, *options]
    subprocess.run(command, check=True, capture_output=True, text=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)


class Server:
    """A program that serves one checkpoint on a device, or split over several, with its log as a list of JSON objects."""

    def __init__(self, program, folder, devices, tune, validation=False, **keys):
        lines = ['[server]', 'listen = "127.0.0.1:0"', '[http]', 'listen = "127.0.0.1:0"', '[admin]',
                 'listen = "127.0.0.1:0"', '[runtime]', f"tune = {json.dumps(tune)}",
                 f"validation = {json.dumps(validation)}", '[[models]]', 'name = "m"',
                 f"path = {json.dumps(str(folder))}"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
        devices = [devices] if isinstance(devices, str) else devices or []
        match devices:
            case []:
                lines += ["replicas = [{}]"]
            case [device]:
                lines += [f"replicas = [{{ device = {json.dumps(device)} }}]"]
            case _:
                lines += [f'replicas = [{{ devices = {json.dumps(devices)}, split = "layers" }}]']
        path = folder.with_suffix(".toml")
        path.write_text("\n".join(lines) + "\n")
        self.log = []
        self.process = subprocess.Popen([program, "serve", "--json", "--config", path], stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.reader.join(5)
            raise RuntimeError(f"no start: {self.log[-3:]}")
        self.addresses = json.loads(line)
        while not any(entry.get("message") == "ready" for entry in self.log):
            if self.process.poll() is not None:
                raise RuntimeError(f"no start: {self.log[-3:]}")
            time.sleep(0.02)

    def read(self):
        for line in self.process.stderr:
            try:
                self.log.append(json.loads(line)["fields"])
            except (ValueError, KeyError):
                self.log.append({"message": line.rstrip()})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.reader.join(5)

    def complete(self, prompts, tokens, **extra):
        """Returns the texts of token-id prompts, drawn greedily, all in one request."""
        body = {"model": "m", "prompt": prompts, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                "skip_special_tokens": False, **extra}
        request = urllib.request.Request(f"http://{self.addresses['http']}/v1/completions", json.dumps(body).encode(),
                                         {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                completion = json.load(answer)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{error}: {error.read().decode()}; log: {self.log[-5:]}") from error
        drawn, asked, choices = completion["usage"]["completion_tokens"], tokens * len(prompts), completion["choices"]
        if drawn != asked:
            raise RuntimeError(f"{drawn} tokens were drawn, {asked} are asked for")
        return [choice["text"] for choice in sorted(choices, key=lambda choice: choice["index"])]

    def steps(self, first):
        """Returns the records of finished plans from a number on."""
        url = f"http://{self.addresses['admin']}/api/steps?replica=m/0&from={first}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["steps"]

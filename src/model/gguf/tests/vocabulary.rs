//! Tokenizers: what is refused, and that a converted tokenizer encodes as its original does.

use std::path::PathBuf;

use serde_json::Value as Json;
use tokenizers::Tokenizer;

use super::super::container::{Array, Header, Value};
use super::super::tokenizer::{TokenizerError, TokenizerFiles, convert, known_pres};
use super::{File, Random, text};

fn converted(file: &File) -> Result<TokenizerFiles, TokenizerError> {
    let bytes = file.bytes();
    convert(&Header::parse(&bytes, bytes.len() as u64).unwrap())
}

fn refused(file: &File) -> String {
    converted(file).expect_err("it is refused").to_string()
}

fn texts(list: &[&str]) -> Value {
    Value::Array(Array::String(list.iter().map(|text| (*text).to_owned()).collect()))
}

fn load(files: &TokenizerFiles) -> Tokenizer {
    Tokenizer::from_bytes(files.tokenizer.to_string()).unwrap()
}

fn ids(tokenizer: &Tokenizer, text: &str, special: bool) -> Vec<u32> {
    tokenizer.encode(text, special).unwrap().get_ids().to_vec()
}

/// Returns a byte-level tokenizer's metadata.
fn byte_level(pre: &str) -> File {
    let tokens = ["a", "b", "ab", "Ġ", "<|im_end|>", "<think>", "<|endoftext|>", "[PAD7]", "Ċ"];
    File::new()
        .pair("tokenizer.ggml.model", text("gpt2"))
        .pair("tokenizer.ggml.pre", text(pre))
        .pair("tokenizer.ggml.tokens", texts(&tokens))
        .pair("tokenizer.ggml.token_type", Value::Array(Array::I32(vec![1, 1, 1, 1, 3, 4, 3, 5, 1])))
        .pair("tokenizer.ggml.merges", texts(&["a b"]))
        .pair("tokenizer.ggml.eos_token_id", Value::U32(4))
        .pair("tokenizer.ggml.bos_token_id", Value::U32(6))
}

/// Returns a SentencePiece tokenizer's metadata.
fn sentence_piece() -> File {
    let mut tokens = vec!["<unk>".to_owned(), "<s>".to_owned(), "</s>".to_owned()];
    tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    tokens.extend(["▁", "a", "b", "▁a", "ab", "▁ab", "<|im_end|>"].map(str::to_owned));
    let mut kinds = vec![2, 3, 3];
    kinds.extend([6; 256]);
    kinds.extend([1, 1, 1, 1, 1, 1, 4]);
    let mut scores = vec![0.0; 259];
    scores.extend([-4.0, -5.0, -6.0, -1.0, -2.0, -3.0, 0.0]);
    File::new()
        .pair("tokenizer.ggml.model", text("llama"))
        .pair("tokenizer.ggml.tokens", Value::Array(Array::String(tokens)))
        .pair("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds)))
        .pair("tokenizer.ggml.scores", Value::Array(Array::F32(scores)))
}

fn with(mut file: File, key: &str, value: Value) -> File {
    let key = format!("tokenizer.{key}");
    file.pairs.retain(|(other, _)| *other != key);
    file.pair(&key, value)
}

fn without(mut file: File, key: &str) -> File {
    file.pairs.retain(|(other, _)| other != key);
    file
}

#[test]
fn every_known_pre_tokenizer_loads() {
    for pre in known_pres() {
        let files = converted(&byte_level(pre)).unwrap();
        let tokenizer = load(&files);
        assert_eq!(ids(&tokenizer, "ab<think> <|im_end|>\n", false), [2, 5, 3, 4, 8], "{pre}");
        assert_eq!(tokenizer.decode(&[2, 3, 0, 4], false).unwrap(), "ab a<|im_end|>", "{pre}");
        let begins = ["llama-bpe", "llama3", "llama-v3", "lfm2", "pixtral", "tekken"].contains(&pre);
        assert_eq!(files.config["add_bos_token"], begins, "{pre}");
        assert_eq!(ids(&tokenizer, "a", true), if begins { vec![6, 0] } else { vec![0] }, "{pre}");
    }
}

#[test]
fn special_tokens_keep_their_ids_and_meaning() {
    let file = with(byte_level("qwen2"), "ggml.add_bos_token", Value::Bool(true));
    let file = with(file, "ggml.add_eos_token", Value::Bool(true));
    let file = with(file, "ggml.padding_token_id", Value::U32(6));
    let files = converted(&file).unwrap();
    let tokenizer = load(&files);
    assert_eq!(ids(&tokenizer, "ba", true), [6, 1, 0, 4]);
    assert_eq!(tokenizer.encode(("a", "b"), true).unwrap().get_ids(), [6, 0, 4, 6, 1, 4]);
    assert_eq!(files.ids.ends, [4, 6]);
    assert_eq!((files.ids.bos, files.ids.eos, files.ids.pad), (Some(6), Some(4), Some(6)));
    let special: Vec<(u32, bool)> = {
        let mut added: Vec<_> =
            tokenizer.get_added_tokens_decoder().iter().map(|(id, token)| (*id, token.special)).collect();
        added.sort_unstable();
        added
    };
    assert_eq!(special, [(4, true), (5, false), (6, true)]);
    // The name that only fills the embedding is no token.
    assert_eq!((tokenizer.token_to_id("[PAD7]"), tokenizer.id_to_token(7), files.tokens), (None, None, 9));
    assert_eq!(tokenizer.id_to_token(8).as_deref(), Some("Ċ"));
    // A token that ends sequences is special, even if the file does not say so.
    let kinds = Value::Array(Array::I32(vec![1; 9]));
    let files = converted(&with(byte_level("qwen2"), "ggml.token_type", kinds)).unwrap();
    assert_eq!(ids(&load(&files), "<|im_end|>", false), [4]);
    // Ids that do not exist stand for no token.
    let files = converted(&with(byte_level("qwen2"), "ggml.eos_token_id", Value::U32(u32::MAX))).unwrap();
    assert_eq!((files.ids.eos, files.ids.ends), (None, vec![4, 6]));
    let file = without(byte_level("llama3"), "tokenizer.ggml.bos_token_id");
    assert_eq!(refused(&file), "tokenizer.ggml.add_bos_token is set, but there is no token for it");
}

#[test]
fn sentence_piece_merges_by_score() {
    let files = converted(&sentence_piece()).unwrap();
    let merges = files.tokenizer["model"]["merges"].to_string();
    assert_eq!(merges, r#"[["▁","a"],["a","b"],["▁a","b"],["▁","ab"]]"#);
    let tokenizer = load(&files);
    let [space, a, b, space_a, ab, space_ab, end] = [259, 260, 261, 262, 263, 264, 265];
    assert_eq!(ids(&tokenizer, "ab", true), [1, space_ab]);
    assert_eq!(ids(&tokenizer, "b ab", false), [space, b, space_ab]);
    assert_eq!(ids(&tokenizer, "aab", false), [space_a, ab]);
    assert_eq!(ids(&tokenizer, "é", false), [space, 3 + 0xc3, 3 + 0xa9]);
    assert_eq!(ids(&tokenizer, "a<|im_end|>a", false), [space_a, end, space_a]);
    // A space is put before the text behind each special token, of any kind, as in llama.cpp, and before nothing else.
    assert_eq!(ids(&tokenizer, "a</s>ab<s><unk>ba</s>", false), [space_a, 2, space_ab, 1, 0, space, b, a, 2]);
    assert_eq!(tokenizer.decode(&[1, space_ab, 3 + 0xc3, 3 + 0xa9, space_a], true).unwrap(), "abé a");
    assert_eq!((files.ids.bos, files.ids.eos, files.ids.ends), (Some(1), Some(2), vec![2, end]));
    assert_eq!(files.config["unk_token"], "<unk>");
    let plain = with(sentence_piece(), "ggml.add_space_prefix", Value::Bool(false));
    let plain = with(plain, "ggml.add_bos_token", Value::Bool(false));
    let tokenizer = load(&converted(&plain).unwrap());
    assert_eq!(ids(&tokenizer, "ab a", true), [ab, space_a]);
    assert_eq!(tokenizer.decode(&[space_a, a], true).unwrap(), " aa");
}

#[test]
fn special_tokens_of_phi_3_take_the_white_space_behind_them() {
    let [space, a, space_a, end, newline] = [259, 260, 262, 265, 3 + 0x0a];
    let named = |name: &str| load(&converted(&sentence_piece().pair("general.name", text(name))).unwrap());
    for name in ["Phi3", "microsoft Phi-3.5-mini"] {
        let phi = named(name);
        assert_eq!(ids(&phi, "<|im_end|>\n a</s> a", false), [end, space_a, 2, space_a], "{name}");
        // These three do not.
        assert_eq!(ids(&phi, "<s> a", false), [1, space, space_a], "{name}");
    }
    assert_eq!(ids(&named("Phi 4"), "<|im_end|>\na", false), [end, space, newline, a]);
}

/// Goal: Gemma 4's tokenizer, which has SentencePiece's tokens and merges instead of scores, is converted without
/// SentencePiece's defaults: no space is put before a text, special tokens are those that the file names, and a sequence
/// begins with its token even if the file says otherwise.
#[test]
fn gemma_4s_merges_are_those_of_the_file() {
    let file = with(sentence_piece(), "ggml.model", text("gemma4"));
    let file = with(file, "ggml.merges", texts(&["a b", "▁ a", "▁ ab"]));
    let file = with(file, "ggml.bos_token_id", Value::U32(1));
    let file = with(file, "ggml.eos_token_id", Value::U32(2));
    let file = with(file, "ggml.unknown_token_id", Value::U32(0));
    let file = without(file, "tokenizer.ggml.scores");
    let [a, b, space_a, ab, space_ab, end] = [260, 261, 262, 263, 264, 265];
    for add_bos in [None, Some(false), Some(true)] {
        let file = match add_bos {
            None => file.clone(),
            Some(flag) => with(file.clone(), "ggml.add_bos_token", Value::Bool(flag)),
        };
        let files = converted(&file).unwrap();
        let tokenizer = load(&files);
        // The first merge wins over the one that scores would prefer.
        assert_eq!(ids(&tokenizer, "ab ab", true), [1, ab, space_ab], "{add_bos:?}");
        assert_eq!(ids(&tokenizer, "b aab", false), [b, space_a, ab]);
        assert_eq!(ids(&tokenizer, "é\n", false), [3 + 0xc3, 3 + 0xa9, 3 + 0x0a]);
        assert_eq!(ids(&tokenizer, "a<|im_end|>a", false), [a, end, a]);
        assert_eq!(tokenizer.decode(&[1, space_ab, 3 + 0xc3, 3 + 0xa9, a], true).unwrap(), " abéa");
        assert_eq!((files.ids.bos, files.ids.eos, &files.ids.ends[..]), (Some(1), Some(2), &[2, end][..]));
    }
    let unnamed = without(file.clone(), "tokenizer.ggml.bos_token_id");
    assert_eq!(refused(&unnamed), "tokenizer.ggml.add_bos_token is set, but there is no token for it");
    let scores_only = with(sentence_piece(), "ggml.model", text("gemma4"));
    assert_eq!(refused(&scores_only), "the metadata key tokenizer.ggml.merges is missing");
    // What ends a turn, and a call of a tool.
    let mut tokens: Vec<String> = file
        .pairs
        .iter()
        .find_map(|(key, value)| (key == "tokenizer.ggml.tokens").then(|| value.texts().unwrap().to_vec()))
        .unwrap();
    tokens[space_ab as usize] = "<|tool_response>".to_owned();
    tokens[end as usize] = "<turn|>".to_owned();
    let kinds = file.pairs.iter().find_map(|(key, value)| match value {
        Value::Array(Array::I32(kinds)) if key == "tokenizer.ggml.token_type" => Some(kinds.clone()),
        _ => None,
    });
    let mut kinds = kinds.unwrap();
    kinds[space_ab as usize] = 4;
    kinds[end as usize] = 3;
    let file = with(file, "ggml.tokens", Value::Array(Array::String(tokens)));
    let file = with(file, "ggml.token_type", Value::Array(Array::I32(kinds)));
    let file = with(file, "ggml.merges", texts(&["a b"]));
    assert_eq!(converted(&file).unwrap().ids.ends, [2, end, space_ab]);
}

#[test]
fn what_is_not_known_is_refused_by_name() {
    let model = |name: &str| refused(&with(byte_level("qwen2"), "ggml.model", text(name)));
    assert_eq!(model("t5"), "tokenizer \"t5\" is not supported (gpt2, llama and gemma4 are)");
    for pre in ["default", "", "kimi-k2", "Qwen2"] {
        let error = refused(&byte_level(pre));
        assert!(error.starts_with(&format!("pre-tokenizer {pre:?} is not supported (qwen2, ")), "{error}");
    }
    let error = refused(&without(byte_level("qwen2"), "tokenizer.ggml.pre"));
    assert!(error.starts_with("pre-tokenizer \"default\" is not supported"), "{error}");
    for key in ["tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"] {
        assert_eq!(refused(&without(byte_level("qwen2"), key)), format!("the metadata key {key} is missing"));
    }
    let change = |key: &str, value: Value| refused(&with(byte_level("qwen2"), key, value));
    assert_eq!(
        change("ggml.token_type", Value::Array(Array::I32(vec![1; 8]))),
        "tokenizer.ggml.token_type has 8 entries, there are 9 tokens"
    );
    assert_eq!(
        change("ggml.token_type", Value::Array(Array::I32(vec![1, 7, 1, 1, 1, 1, 1, 1, 1]))),
        "token 1 has the type 7, must be 1 to 6"
    );
    for merge in ["ab", "a  b", "a c", "b a", "", " ", "é"] {
        let error = change("ggml.merges", texts(&["a b", merge]));
        assert_eq!(error, format!("merge 1 is {merge:?}, must be two tokens that form a third"));
    }
    assert_eq!(
        change("ggml.tokens", texts(&["a", "b", "ab", "a", "e", "f", "g", "h", "i"])),
        "token \"a\" has the ids 0 and 3"
    );
    assert_eq!(change("ggml.add_bos_token", Value::U8(1)), "tokenizer.ggml.add_bos_token is 1, must be true or false");
    assert_eq!(change("chat_template", Value::U8(1)), "tokenizer.chat_template is 1, must be a text");
    let change = |key: &str, value: Value| refused(&with(sentence_piece(), key, value));
    assert_eq!(
        change("ggml.scores", Value::Array(Array::F32(vec![0.0; 3]))),
        "tokenizer.ggml.scores has 3 entries, there are 266 tokens"
    );
    assert_eq!(
        change("ggml.scores", Value::Array(Array::F32(vec![f32::NAN; 266]))),
        "token 259 has a score that is not a number"
    );
}

#[test]
fn chat_templates_keep_their_names() {
    let file = with(byte_level("qwen2"), "chat_template", text("d"));
    assert_eq!(converted(&file).unwrap().config["chat_template"], "d");
    let file = with(file, "chat_template.tool_use", text("t"));
    let file = with(file, "chat_templates", texts(&["tool_use"]));
    assert_eq!(
        converted(&file).unwrap().config["chat_template"].to_string(),
        r#"[{"name":"default","template":"d"},{"name":"tool_use","template":"t"}]"#
    );
    assert_eq!(converted(&byte_level("qwen2")).unwrap().config.get("chat_template"), None);
}

/// The demo model's tokenizer, written as a converter writes it, and read back.
#[test]
fn the_demos_tokenizer_comes_back() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/demo/model/tokenizer.json");
    let original = Tokenizer::from_file(path).unwrap();
    let json: Json = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let count = original.get_vocab_size(true);
    let tokens = (0..count + 5).map(|id| original.id_to_token(id as u32).unwrap_or(format!("[PAD{id}]")));
    let tokens: Vec<String> = tokens.collect();
    let added = original.get_added_tokens_decoder();
    let kind = |id: usize| match added.get(&(id as u32)) {
        Some(token) => 4 - i32::from(token.special),
        None => 1 + 4 * i32::from(id >= count),
    };
    let kinds = (0..tokens.len()).map(kind).collect();
    let merge = |pair: &Json| format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap());
    let merges = json["model"]["merges"].as_array().unwrap().iter().map(merge).collect();
    let file = File::new()
        .pair("tokenizer.ggml.model", text("gpt2"))
        .pair("tokenizer.ggml.pre", text("ufakzeka"))
        .pair("tokenizer.ggml.tokens", Value::Array(Array::String(tokens.clone())))
        .pair("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds)))
        .pair("tokenizer.ggml.merges", Value::Array(Array::String(merges)))
        .pair("tokenizer.ggml.eos_token_id", Value::U32(2));
    let files = converted(&file).unwrap();
    let again = load(&files);
    assert_eq!(again.get_vocab(true), original.get_vocab(true));
    assert_eq!(files.ids.ends, [2, 0]);
    let mut random = Random(5);
    let characters: Vec<char> = concat!(
        "aeinorst AEIT0123456789.,:;!?'\"()[]{}<>|/\\_-+=*&^%$#@~`\n\t\r  ",
        "äßéñøЖдя中文字日本語한국🚀👩\u{200d}\u{301}\u{a0}"
    )
    .chars()
    .collect();
    for round in 0..3_000 {
        let mut string = String::new();
        for _ in 0..random.below(40) {
            match random.below(4) {
                // Tokens of the vocabulary, with their spaces.
                0 => string += &tokens[random.below(count)].replace('Ġ', " ").replace('Ċ', "\n"),
                _ => string.push(characters[random.below(characters.len())]),
            }
        }
        let expected = ids(&original, &string, true);
        assert_eq!(ids(&again, &string, true), expected, "round {round}: {string:?}");
        assert_eq!(again.decode(&expected, true).unwrap(), original.decode(&expected, true).unwrap());
    }
}

/// Tokenizers with the ids that the original gives for many texts. The folder is named by the environment variable
/// `GGUF_TOKENIZERS` and holds `NAME.gguf` and `NAME.corpus.json`, a list of pairs of a text and its ids.
#[test]
#[ignore = "needs GGUF_TOKENIZERS"]
fn converted_tokenizers_encode_as_their_originals() {
    let folder = std::env::var_os("GGUF_TOKENIZERS").map(PathBuf::from).expect("GGUF_TOKENIZERS is set");
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|end| end != "gguf") {
            continue;
        }
        let bytes = std::fs::read(&path).unwrap();
        let files = convert(&Header::parse(&bytes, bytes.len() as u64).unwrap()).unwrap();
        let tokenizer = load(&files);
        let corpus = std::fs::read(path.with_extension("corpus.json")).unwrap();
        let corpus: Vec<(String, Vec<u32>)> = serde_json::from_slice(&corpus).unwrap();
        let mut wrong = 0;
        for (text, expected) in &corpus {
            let found = ids(&tokenizer, text, false);
            if found != *expected {
                wrong += 1;
                if wrong < 4 {
                    println!("{}: {text:?}\n  {found:?}\n  {expected:?}", path.display());
                }
            }
        }
        println!("{}: {wrong} of {} texts differ", path.display(), corpus.len());
        seen += wrong;
    }
    assert_eq!(seen, 0);
}

/// Vocabularies with the texts and ids of llama.cpp's own tests: `NAME.gguf`, `NAME.gguf.inp` and `NAME.gguf.out` in
/// the folder that the environment variable `GGUF_VOCABULARIES` names.
#[test]
#[ignore = "needs GGUF_VOCABULARIES"]
fn published_vocabularies_encode_as_published() {
    let folder = std::env::var_os("GGUF_VOCABULARIES").map(PathBuf::from).expect("GGUF_VOCABULARIES is set");
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|end| end == "gguf"));
    paths.sort();
    let mut failed = Vec::new();
    for path in paths {
        let bytes = std::fs::read(&path).unwrap();
        let header = Header::parse(&bytes, bytes.len() as u64).unwrap();
        let mut files = match convert(&header) {
            Ok(files) => files,
            Err(error) => {
                println!("{}: {error}", path.display());
                continue;
            }
        };
        // llama.cpp does not normalise text, which some of its ids show; the checkpoints' own tokenizers do.
        if files.tokenizer["normalizer"]["type"] == "NFC" {
            files.tokenizer["normalizer"] = Json::Null;
        }
        let tokenizer = load(&files);
        let beside = |end: &str| std::fs::read_to_string(format!("{}.{end}", path.display())).ok();
        let (Some(texts), Some(expected)) = (beside("inp"), beside("out")) else {
            println!("{}: loads", path.display());
            continue;
        };
        let texts: Vec<&str> = texts.split("\n__ggml_vocab_test__\n").collect();
        let mut wrong = 0;
        for (text, line) in texts.iter().zip(expected.lines()) {
            let expected: Vec<u32> = line.split_whitespace().map(|id| id.parse().unwrap()).collect();
            let found = ids(&tokenizer, text, false);
            if found != expected {
                wrong += 1;
                println!("{}: {text:?}\n  {found:?}\n  {expected:?}", path.display());
            }
        }
        println!("{}: {wrong} of {} texts differ", path.display(), texts.len());
        if wrong > 0 {
            failed.push(path);
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

/// Random metadata of tokenizers that load have tokenizers that load, or are refused.
#[test]
fn random_vocabularies_load_or_are_refused() {
    let mut random = Random(3);
    let mut loaded = 0;
    for _ in 0..3_000 {
        let letters = ["a", "b", "ab", "abb", "Ġ", "é", "▁", "", "<0x41>", "<|im_end|>", "\n", "ba", "[PAD3]"];
        let count = 1 + random.below(8);
        let tokens: Vec<&str> = (0..count).map(|_| letters[random.below(letters.len())]).collect();
        let kinds = (0..count).map(|_| 1 + random.below(6) as i32).collect();
        let scores = (0..count).map(|_| random.below(5) as f32).collect();
        let mut file = File::new()
            .pair("tokenizer.ggml.model", text(["gpt2", "llama"][random.below(2)]))
            .pair("tokenizer.ggml.pre", text("qwen2"))
            .pair("tokenizer.ggml.tokens", texts(&tokens))
            .pair("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds)))
            .pair("tokenizer.ggml.scores", Value::Array(Array::F32(scores)))
            .pair("tokenizer.ggml.add_bos_token", Value::Bool(random.below(2) == 0))
            .pair("tokenizer.ggml.bos_token_id", Value::U32(random.below(9) as u32));
        if random.below(2) == 0 {
            let merges = ["a b", "ab b", "b a", "a  b"];
            file = file.pair("tokenizer.ggml.merges", texts(&merges[..random.below(4)]));
        }
        if let Ok(files) = converted(&file) {
            let tokenizer = load(&files);
            for id in tokenizer.get_vocab(true).values() {
                assert!((*id as usize) < files.tokens);
            }
            let Json::Array(added) = &files.tokenizer["added_tokens"] else { panic!() };
            for token in added {
                let id = token["id"].as_u64().unwrap() as u32;
                assert_eq!(tokenizer.token_to_id(token["content"].as_str().unwrap()), Some(id));
            }
            let _ = tokenizer.encode("ab a<|im_end|>\n", true);
            loaded += 1;
        }
    }
    println!("{loaded} of 3000 load");
    assert!(loaded > 100);
}

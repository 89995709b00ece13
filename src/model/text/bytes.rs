//! The bytes that each token stands for. Deliberately absent: how a decoder makes characters of them.

use tokenizers::Tokenizer;

/// Before a special token's name: no text begins so.
const SPECIAL: u8 = 0xff;

/// How a tokenizer writes bytes in its tokens.
#[derive(Clone, Copy, PartialEq)]
enum Spelling {
    /// Each byte is a character of GPT-2's alphabet.
    ByteLevel,
    /// UTF-8 with `▁` for a space; `<0x0A>` is a byte.
    ByteFallback,
}

/// By id; empty where there is no token, a special token's name behind a byte that no text has. `None`: the tokenizer
/// spells its tokens in another way.
pub(super) fn token_bytes(tokenizer: &Tokenizer) -> Option<Vec<Vec<u8>>> {
    let spelling = spelling(tokenizer)?;
    let added = tokenizer.get_added_tokens_decoder();
    let alphabet = alphabet();
    let count = tokenizer.get_vocab(true).values().max().map_or(0, |id| id + 1);
    let bytes = |id: u32| -> Vec<u8> {
        if let Some(token) = added.get(&id) {
            let mark: &[u8] = if token.special { &[SPECIAL] } else { &[] };
            return [mark, token.content.as_bytes()].concat();
        }
        let Some(token) = tokenizer.id_to_token(id) else { return Vec::new() };
        match spelling {
            Spelling::ByteLevel => {
                let byte = |c: char| alphabet.iter().position(|other| *other == c).map(|byte| byte as u8);
                token.chars().map(byte).collect::<Option<Vec<u8>>>().unwrap_or_else(|| token.into_bytes())
            }
            Spelling::ByteFallback => {
                let hex = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
                match hex.filter(|hex| hex.len() == 2).and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
                    Some(byte) => vec![byte],
                    None => token.replace('\u{2581}', " ").into_bytes(),
                }
            }
        }
    };
    Some((0..count).map(bytes).collect())
}

fn spelling(tokenizer: &Tokenizer) -> Option<Spelling> {
    // The decoder says it, alone or in a sequence.
    let decoder = serde_json::to_string(tokenizer.get_decoder()?).ok()?;
    if decoder.contains("\"ByteLevel\"") {
        Some(Spelling::ByteLevel)
    } else if decoder.contains("\"ByteFallback\"") {
        Some(Spelling::ByteFallback)
    } else {
        None
    }
}

/// GPT-2's character for each byte: printable ones stand for themselves, the others follow from U+0100 on.
fn alphabet() -> [char; 256] {
    let plain = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 0x100u32;
    std::array::from_fn(|byte| {
        let byte = byte as u8;
        if plain(byte) {
            char::from(byte)
        } else {
            let c = char::from_u32(next).expect("below the surrogates");
            next += 1;
            c
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_is_gpt2s() {
        let alphabet = alphabet();
        assert_eq!(alphabet[b' ' as usize], 'Ġ');
        assert_eq!(alphabet[b'\n' as usize], 'Ċ');
        assert_eq!(alphabet[0xad], '\u{143}');
        let distinct: std::collections::HashSet<char> = alphabet.into_iter().collect();
        assert_eq!(distinct.len(), 256);
    }
}

//! The bytes of each token.
//!
//! Not here: how a decoder turns bytes into characters.

use tokenizers::Tokenizer;

/// The byte that precedes a special token's name. It occurs in no UTF-8 text.
const SPECIAL: u8 = 0xff;

/// The ways in which a tokenizer spells bytes in its tokens.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Spelling {
    /// Byte-level: each byte is one character of GPT-2's alphabet.
    ByteLevel,
    /// Byte fallback: UTF-8 with `▁` for a space; `<0x0A>` is a single byte.
    ByteFallback,
    /// UTF-8 with `▁` for a space, without tokens of single bytes.
    Metaspace,
}

/// Returns the bytes of each token, indexed by id: empty if there is no such token; for a special token [`SPECIAL`]
/// followed by the token's name. Returns `None` if the tokenizer has no tokens of single bytes, or uses another spelling.
pub(super) fn token_bytes(tokenizer: &Tokenizer) -> Option<Vec<Vec<u8>>> {
    let spelling = spelling(tokenizer).filter(|spelling| *spelling != Spelling::Metaspace)?;
    let added = tokenizer.get_added_tokens_decoder();
    let alphabet = alphabet();
    let count = tokenizer.get_vocab(true).values().max().map_or(0, |id| id + 1);
    let bytes = |id: u32| -> Vec<u8> {
        if let Some(token) = added.get(&id) {
            let mark: &[u8] = if token.special { &[SPECIAL] } else { &[] };
            return [mark, token.content.as_bytes()].concat();
        }
        let Some(token) = tokenizer.id_to_token(id) else { return Vec::new() };
        spelled(token, spelling, &alphabet)
    };
    Some((0..count).map(bytes).collect())
}

/// Returns the bytes of one token; of a special token those of its name. Empty if there is no such token.
pub(super) fn of_token(tokenizer: &Tokenizer, spelling: Spelling, id: u32) -> Vec<u8> {
    let Some(token) = tokenizer.id_to_token(id) else { return Vec::new() };
    match tokenizer.get_added_vocabulary().simple_id_to_token(id) {
        Some(name) => name.into_bytes(),
        None => spelled(token, spelling, &alphabet()),
    }
}

/// Returns the bytes that an ordinary token spells.
fn spelled(token: String, spelling: Spelling, alphabet: &[char; 256]) -> Vec<u8> {
    match spelling {
        Spelling::ByteLevel => {
            let byte = |c: char| alphabet.iter().position(|other| *other == c).map(|byte| byte as u8);
            token.chars().map(byte).collect::<Option<Vec<u8>>>().unwrap_or_else(|| token.into_bytes())
        }
        Spelling::ByteFallback => {
            let hex = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
            match hex.filter(|hex| hex.len() == 2).and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
                Some(byte) => vec![byte],
                None => spaced(&token),
            }
        }
        Spelling::Metaspace => spaced(&token),
    }
}

/// Returns the bytes of a token in which `▁` is a space.
fn spaced(token: &str) -> Vec<u8> {
    token.replace('\u{2581}', " ").into_bytes()
}

/// Returns how a tokenizer spells bytes; `None` if in another way than these.
pub(super) fn spelling(tokenizer: &Tokenizer) -> Option<Spelling> {
    // The decoder determines the spelling. It may be part of a sequence of decoders.
    let decoder = serde_json::to_string(tokenizer.get_decoder()?).ok()?;
    if decoder.contains("\"ByteLevel\"") {
        Some(Spelling::ByteLevel)
    } else if decoder.contains("\"ByteFallback\"") {
        Some(Spelling::ByteFallback)
    } else if decoder.contains("\"Metaspace\"") {
        Some(Spelling::Metaspace)
    } else {
        None
    }
}

/// Returns GPT-2's character for each byte: printable characters represent themselves, the others are numbered from
/// U+0100.
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

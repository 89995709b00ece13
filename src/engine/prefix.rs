//! Keys of pages by content: a chain of hashes, each over a full page's tokens and the key of the page before it. Equal
//! keys mean equal tokens from the first token on, under the same cache salt.
//! Not here: which sequence holds which page (`page_pool`).

use crate::kernels::attention::PAGE_TOKENS;
use sha2::{Digest, Sha256};

/// Identifies a full page by its tokens and all tokens before them: 128 bits of a SHA-256, the same in every process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageKey(pub u128);

impl PageKey {
    /// Returns the key that a chain starts from. It depends on the salt, so that requests with different salts cannot
    /// find each other's pages.
    pub fn root(salt: &str) -> PageKey {
        PageKey::of(Sha256::new_with_prefix(b"ostinato page chain 1\0").chain_update(salt))
    }

    /// Returns the key of the page that holds `tokens`, [`PAGE_TOKENS`] of them, and follows the page with this key.
    pub fn next(self, tokens: &[u32]) -> PageKey {
        debug_assert_eq!(tokens.len(), PAGE_TOKENS as usize);
        let mut hash = Sha256::new_with_prefix(self.0.to_le_bytes());
        for token in tokens {
            hash.update(token.to_le_bytes());
        }
        PageKey::of(hash)
    }

    fn of(hash: Sha256) -> PageKey {
        let digest = hash.finalize();
        PageKey(u128::from_le_bytes(digest[..16].try_into().expect("a digest has 32 bytes")))
    }
}

/// Returns the keys of all full pages of `tokens`, in order.
pub fn page_keys(salt: &str, tokens: &[u32]) -> Vec<PageKey> {
    let pages = tokens.chunks_exact(PAGE_TOKENS as usize);
    pages
        .scan(PageKey::root(salt), |key, page| {
            *key = key.next(page);
            Some(*key)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_beginnings_have_equal_names_up_to_where_they_part() {
        let a: Vec<u32> = (0..50).collect();
        let mut b = a.clone();
        b[20] = 99;
        let (a, b) = (page_keys("", &a), page_keys("", &b));
        assert_eq!((a.len(), b.len()), (3, 3), "only full pages have names");
        assert_eq!(a[0], b[0]);
        assert_ne!(a[1], b[1]);
        assert_ne!(a[2], b[2], "what follows a difference differs, though its tokens are equal");
    }

    #[test]
    fn tenants_do_not_share_names() {
        let tokens = [7; 16];
        assert_ne!(page_keys("a", &tokens), page_keys("b", &tokens));
        assert_eq!(page_keys("a", &tokens), page_keys("a", &tokens));
    }

    #[test]
    fn pages_of_equal_tokens_at_different_places_differ() {
        let keys = page_keys("", &[7; 48]);
        assert!(keys[0] != keys[1] && keys[1] != keys[2] && keys[0] != keys[2]);
    }
}

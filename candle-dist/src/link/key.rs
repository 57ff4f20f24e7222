//! Proofs that a process knows the secret of its job, without sending it.
use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};
use std::fmt;

/// The length of a proof, in bytes.
pub(crate) const PROOF: usize = 32;

/// The key that the processes of a job make of its secret and its name, which may be empty.
#[derive(Clone)]
pub(crate) struct JobKey(Hmac<Sha256>);

/// Who proves that it knows the key. An answer of one role is no answer of the other.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Role {
    /// A process that wants to join.
    Guest,
    /// Rank 0.
    Host,
}

impl fmt::Debug for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobKey(..)")
    }
}

impl JobKey {
    pub(crate) fn new(secret: &[u8], job: &str) -> Self {
        // A key of the block's length, which any secret has after it is hashed.
        let mut block = [0; 64];
        block[..PROOF].copy_from_slice(&Sha256::digest(secret));
        Self(with(Hmac::new(&block.into()), &[b"candle-dist", job.as_bytes()]))
    }

    /// Returns the proof of `role` over what both sides have sent so far.
    pub(crate) fn proof(&self, role: Role, sent: &[&[u8]]) -> [u8; PROOF] {
        self.over(role, sent).finalize().into_bytes().into()
    }

    /// Returns whether a proof is right, in constant time.
    pub(crate) fn accepts(&self, proof: &[u8; PROOF], role: Role, sent: &[&[u8]]) -> bool {
        self.over(role, sent).verify_slice(proof).is_ok()
    }

    fn over(&self, role: Role, sent: &[&[u8]]) -> Hmac<Sha256> {
        let name: &[u8] = match role {
            Role::Guest => b"guest",
            Role::Host => b"host",
        };
        with(with(self.0.clone(), &[name]), sent)
    }
}

/// Adds parts with their lengths, so that no two lists of parts are the same bytes.
fn with(mut mac: Hmac<Sha256>, parts: &[&[u8]]) -> Hmac<Sha256> {
    for part in parts {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_right_for_its_secret_job_role_and_words_only() {
        let key = JobKey::new(b"secret", "job");
        let proof = key.proof(Role::Guest, &[b"ab", b"c"]);
        assert!(key.accepts(&proof, Role::Guest, &[b"ab", b"c"]));
        for other in [
            JobKey::new(b"secret", "bob"),
            JobKey::new(b"secre", "tjob"),
            JobKey::new(b"", ""),
            JobKey::new(&proof, "job"),
        ] {
            assert!(!other.accepts(&proof, Role::Guest, &[b"ab", b"c"]));
        }
        assert!(!key.accepts(&proof, Role::Host, &[b"ab", b"c"]));
        for sent in [&[&b"a"[..], b"bc"][..], &[b"abc"], &[b"ab", b"c", b""], &[b"ab", b"d"]] {
            assert!(!key.accepts(&proof, Role::Guest, sent));
        }
        for bit in 0..8 * PROOF {
            let mut wrong = proof;
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert!(!key.accepts(&wrong, Role::Guest, &[b"ab", b"c"]));
        }
    }

    #[test]
    fn its_debug_form_hides_it() {
        assert_eq!(format!("{:?}", JobKey::new(b"secret", "job")), "JobKey(..)");
    }
}

//! Explanations of NCCL's errors, and how to fix them.

/// The oldest library with all required features, in particular nonblocking communicators.
const OLDEST: i32 = 21800;

/// Refuses a library that is too old. `version` is NCCL's number, e.g. 23007 for 2.30.7.
pub(super) fn check_version(version: i32) -> Result<(), String> {
    if version >= OLDEST {
        return Ok(());
    }
    let (found, wanted) = (display(version), display(OLDEST));
    Err(format!(
        "the NCCL library found is {found}, but this backend needs {wanted} or later; \
         put a newer libnccl.so.2 first in LD_LIBRARY_PATH"
    ))
}

fn display(version: i32) -> String {
    format!("{}.{}.{}", version / 10000, version / 100 % 100, version % 100)
}

/// Formats an error of NCCL with its own message and, if known, a fix.
pub(super) fn explain(op: &str, gpu: usize, error: &str, detail: &str) -> String {
    let detail = detail.trim();
    let about = if detail.is_empty() { String::new() } else { format!(" ({detail})") };
    let fix = fix(detail).map_or(String::new(), |fix| format!("; {fix}"));
    format!("NCCL, {op} on GPU {gpu}: {error}{about}{fix}")
}

fn fix(detail: &str) -> Option<&'static str> {
    let same_gpu = ["Duplicate GPU", "same GPU"].iter().any(|words| detail.contains(words));
    same_gpu.then_some(
        "give each rank a GPU of its own; to try several ranks on one GPU, set NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or later",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_library_is_named_with_what_is_needed() {
        assert_eq!(check_version(23007), Ok(()));
        let text = check_version(21602).expect_err("too old");
        assert!(text.contains("2.16.2") && text.contains("2.18.0 or later"), "{text}");
    }

    #[test]
    fn errors_say_where_and_how_to_mend_them() {
        let detail = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000\n";
        let text = explain("init", 3, "invalid usage", detail);
        let start = "NCCL, init on GPU 3: invalid usage (Duplicate GPU detected : rank 1 and rank 0";
        assert!(
            text.starts_with(start) && text.contains("NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30"),
            "{text}"
        );
        assert_eq!(explain("all_reduce", 0, "remote error", ""), "NCCL, all_reduce on GPU 0: remote error");
    }
}

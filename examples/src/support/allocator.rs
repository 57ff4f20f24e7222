//! The allocator of the programs, which keeps its pages.
//!
//! Each op of a training step allocates its result and frees it soon after. If an allocator returns large blocks to the
//! kernel, the kernel faults in and clears their pages again, which takes a third of a large step. Page faults of one
//! process also queue for one lock, so ranks that are threads wait for each other.

use libmimalloc_sys::{mi_option_set, mi_option_t, mi_option_use_numa_nodes};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// mimalloc's `mi_option_purge_delay`: the Rust binding does not name it, but its neighbor in the enumeration.
const PURGE_DELAY: mi_option_t = mi_option_use_numa_nodes - 1;

/// Keeps freed pages in the process. Call it first in `main`.
pub fn keep_pages() {
    // SAFETY: the call writes one entry of mimalloc's table of options. It is not safe against other threads that read
    // the table, so it stands first in `main`, where there are none.
    unsafe { mi_option_set(PURGE_DELAY, -1) };
}

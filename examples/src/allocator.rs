//! The allocator of the programs: one that keeps the pages it has.
//!
//! Every op of a training step allocates its result and frees it soon after. An allocator that hands big blocks back to
//! the kernel has every page of them faulted in and cleared anew, a third of a large step; and page faults of one
//! process queue for one lock, so that ranks which are threads wait for each other.

use libmimalloc_sys::{mi_option_set, mi_option_t, mi_option_use_numa_nodes};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// mimalloc's `mi_option_purge_delay`, which its Rust binding does not name, by its neighbor in the enumeration.
const PURGE_DELAY: mi_option_t = mi_option_use_numa_nodes - 1;

/// Never gives freed pages back to the kernel; call it first in `main`.
pub fn keep_pages() {
    // SAFETY: the call writes one entry of mimalloc's table of options. It is not safe against other threads that read
    // the table, so it stands first in `main`, where there are none.
    unsafe { mi_option_set(PURGE_DELAY, -1) };
}

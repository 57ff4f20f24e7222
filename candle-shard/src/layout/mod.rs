//! How a tensor lies on a mesh, without any tensor: placements, specs, and the blocks that ranks hold.
mod axes;
mod block;
mod description;
mod placement;
mod spec;
mod stored_name;
mod width;

pub(crate) use axes::{Axes, axes_of};
pub(crate) use block::{Block, first_overlap, intersection, volume, whole};
pub use description::SpecDescription;
pub use placement::{Partial, Placement, Placements, Replicate, Shard};
pub use spec::{Sizes, Spec, chunk_sizes};
pub(crate) use stored_name::{RowsOf, StoredName};
pub use width::Width;

//! Exchange of matrix shards with the ranks that orthogonalize the matrices.
use crate::Result;
use crate::layout::{Shard, Spec};
use candle_core::Tensor;
use candle_dist::{DeviceMesh, ProcessGroup};
use itertools::Itertools;
use std::ops::Range;

/// This rank's shard of a matrix, and the rank of the mesh that gets the whole matrix.
pub(super) struct MatrixShard<'a> {
    pub(super) spec: &'a Spec,
    pub(super) owner: usize,
    pub(super) local: Tensor,
}

/// Elements of a matrix that one rank sends to another.
struct MatrixMessage {
    matrix: usize,
    from: usize,
    to: usize,
    /// The rank that holds these elements of the matrix.
    holder: usize,
    len: usize,
}

/// Gathers the matrices that this rank owns. One exchange, unless no matrix is sharded.
///
/// `nothing` has no elements, and the dtype and device of the shards.
pub(super) fn gather(
    mesh: &DeviceMesh,
    nothing: &Tensor,
    matrices: &[MatrixShard<'_>],
) -> Result<Vec<Option<Tensor>>> {
    let blocks = MatrixBlocks::new(mesh, matrices);
    // Among ranks with the same block, the sender is the one with the owner's coordinates on the axes that do not shard
    // it.
    let sends = |i: usize, from: usize| {
        let MatrixShard { spec, owner, .. } = &matrices[i];
        let is_same = |axis: usize| blocks.coordinates[from][axis] == blocks.coordinates[*owner][axis];
        spec.placements()
            .iter()
            .enumerate()
            .all(|(axis, placement)| matches!(placement, Shard(_)) || is_same(axis))
    };
    let messages = blocks.messages(|i, rank| {
        let to = matrices[i].owner;
        (rank != to && sends(i, rank)).then_some((rank, to))
    });
    let group = mesh.group()?;
    let payload = |message: &MatrixMessage| Ok(matrices[message.matrix].local.clone());
    let received =
        if messages.is_empty() { Vec::new() } else { exchange(group, nothing, &messages, payload)? };
    let mut parts: Vec<Vec<(usize, Tensor)>> = matrices.iter().map(|_| Vec::new()).collect();
    for (message, part) in received {
        let [rows, columns] = blocks.of(message.matrix, message.holder);
        parts[message.matrix].push((message.holder, part.reshape((rows.len(), columns.len()))?));
    }
    let whole = |(i, mut parts): (usize, Vec<(usize, Tensor)>)| {
        if matrices[i].owner != group.rank() {
            return Ok(None);
        }
        parts.push((group.rank(), matrices[i].local.clone()));
        let parts = parts.into_iter().filter(|(_, part)| part.elem_count() > 0);
        let placed = parts.map(|(holder, part)| (blocks.of(i, holder).map(|range| range.start), part));
        join(placed.collect()).map(Some)
    };
    parts.into_iter().enumerate().map(whole).collect()
}

/// Returns this rank's shards of the matrices, which are whole at their owners. One exchange if `nothing` is given.
pub(super) fn spread(
    mesh: &DeviceMesh,
    nothing: Option<&Tensor>,
    matrices: &[MatrixShard<'_>],
    wholes: &[Option<Tensor>],
) -> Result<Vec<Tensor>> {
    let blocks = MatrixBlocks::new(mesh, matrices);
    let messages = blocks.messages(|i, rank| {
        let from = matrices[i].owner;
        (rank != from).then_some((from, rank))
    });
    let (group, me) = (mesh.group()?, mesh.group()?.rank());
    let block = |i: usize, holder: usize| {
        let whole = wholes[i].as_ref().map_or_else(|| matrices[i].local.clone(), Tensor::clone);
        let [rows, columns] = blocks.of(i, holder);
        Ok(whole.narrow(0, rows.start, rows.len())?.narrow(1, columns.start, columns.len())?)
    };
    let payload = |message: &MatrixMessage| block(message.matrix, message.holder);
    let received = match nothing {
        Some(nothing) => exchange(group, nothing, &messages, payload)?,
        None => Vec::new(),
    };
    let mut pieces: Vec<Option<Tensor>> = vec![None; matrices.len()];
    for (message, part) in received {
        pieces[message.matrix] = Some(part);
    }
    let piece = |(i, piece): (usize, Option<Tensor>)| {
        let MatrixShard { local, owner, .. } = &matrices[i];
        match piece {
            Some(piece) => Ok(piece.reshape(local.shape())?),
            None if *owner == me => Ok(block(i, me)?.contiguous()?),
            None => Ok(local.clone()), // no elements
        }
    };
    pieces.into_iter().enumerate().map(piece).collect()
}

/// Returns whether a rank other than the owner holds elements of a matrix.
pub(super) fn is_held_elsewhere(mesh: &DeviceMesh, spec: &Spec, owner: usize) -> bool {
    let has_elements = |at: &[usize]| spec.block_at(at).iter().all(|range| !range.is_empty());
    mesh.coordinates().enumerate().any(|(rank, at)| rank != owner && has_elements(&at))
}

/// The block of each matrix on each rank.
struct MatrixBlocks {
    coordinates: Vec<Vec<usize>>,
    /// By matrix and rank: rows and columns.
    blocks: Vec<Vec<[Range<usize>; 2]>>,
}

impl MatrixBlocks {
    fn new(mesh: &DeviceMesh, matrices: &[MatrixShard<'_>]) -> Self {
        let coordinates = mesh.coordinates().collect_vec();
        let block = |spec: &Spec, at: &Vec<usize>| {
            let block = spec.block_at(at);
            std::array::from_fn(|dim| block.get(dim).cloned().unwrap_or(0..1))
        };
        let of_matrix =
            |matrix: &MatrixShard<'_>| coordinates.iter().map(|at| block(matrix.spec, at)).collect();
        Self { blocks: matrices.iter().map(of_matrix).collect(), coordinates }
    }

    fn of(&self, matrix: usize, rank: usize) -> [Range<usize>; 2] {
        self.blocks[matrix][rank].clone()
    }

    /// Returns a message for each block with elements for which `route` returns sender and receiver.
    fn messages(&self, route: impl Fn(usize, usize) -> Option<(usize, usize)>) -> Vec<MatrixMessage> {
        let all = (0..self.blocks.len()).cartesian_product(0..self.coordinates.len());
        let message = |(matrix, holder): (usize, usize)| {
            let [rows, columns] = self.of(matrix, holder);
            let (from, to) = route(matrix, holder)?;
            Some(MatrixMessage { matrix, from, to, holder, len: rows.len() * columns.len() })
        };
        all.filter_map(message).filter(|message| message.len > 0).collect()
    }
}

/// Exchanges the messages; `payload` returns the data to send. Returns the received messages, each flat.
fn exchange<'a>(
    group: &ProcessGroup,
    nothing: &Tensor,
    messages: &'a [MatrixMessage],
    payload: impl Fn(&MatrixMessage) -> Result<Tensor>,
) -> Result<Vec<(&'a MatrixMessage, Tensor)>> {
    let (me, size) = (group.rank(), group.size());
    let mut counts = vec![vec![0; size]; size];
    messages.iter().for_each(|message| counts[message.from][message.to] += message.len);
    let sent = messages.iter().filter(|message| message.from == me).sorted_by_key(|message| message.to);
    let sent = sent.map(|message| Ok(payload(message)?.flatten_all()?)).collect::<Result<Vec<_>>>()?;
    let sent = if sent.is_empty() { nothing.clone() } else { Tensor::cat(&sent, 0)? };
    let received = group.all_to_all_single(&sent, &counts)?;
    let mut start = 0;
    let mine = messages.iter().filter(|message| message.to == me).sorted_by_key(|message| message.from);
    let part = |message: &'a MatrixMessage| {
        let part = received.narrow(0, start, message.len)?;
        start += message.len;
        Ok((message, part))
    };
    mine.map(part).collect()
}

/// Joins the blocks of a grid, each with its first row and column, to a matrix.
fn join(mut blocks: Vec<([usize; 2], Tensor)>) -> Result<Tensor> {
    blocks.sort_by_key(|(start, _)| *start);
    let rows = blocks.chunk_by(|([one, _], _), ([other, _], _)| one == other);
    let row =
        |row: &[([usize; 2], Tensor)]| Tensor::cat(&row.iter().map(|(_, block)| block).collect_vec(), 1);
    let rows = rows.map(row).collect::<candle_core::Result<Vec<_>>>()?;
    Ok(Tensor::cat(&rows, 0)?)
}

//! Lookup of rows in a table that may be sharded by rows or by columns.
use super::neutral;
use crate::placement::{Placement, Replicate, Shard};
use crate::rules::{self, Row, Rows, Signature};
use crate::spec::Spec;
use crate::{DTensor, Error, Result};
use candle_core::{DType, Tensor};

impl DTensor {
    /// The rows of this table `[rows, width]` at `ids` (u32, any shape): `[.., width]`.
    ///
    /// A table sharded by columns is looked up where it lies; one sharded by rows gives partial sums, in which each
    /// rank has the rows that it holds and zeros elsewhere.
    ///
    /// # Errors
    /// If an id is not a row of the table; the ids on each rank are checked against the global number of rows.
    pub fn embedding(&self, ids: &Self) -> Result<Self> {
        let signature = || self.embedding_signature(ids);
        rules::run("embedding", &[], &[self, ids], signature, |x, out| lookup(&x[0], x[1].to_local(), out))
    }

    fn embedding_signature(&self, ids: &Self) -> Result<Signature> {
        let &[_, width] = self.dims() else {
            return Error::op("embedding", format!("a table {}: want [rows, width]", self.spec()));
        };
        if ids.dtype() != DType::U32 || ids.tracked() {
            return Error::op("embedding", format!("ids {}: want u32", ids.spec()));
        }
        let last = ids.rank();
        let mut rows: Rows = (0..last).map(|d| Row::new(Shard(d), &[Replicate, Shard(d)])).collect();
        rows.push(Row::new(Shard(last), &[Shard(1), Replicate]));
        rows.push(Row::new(Placement::PARTIAL_SUM, &[Shard(0), Replicate]));
        let mut shape = ids.dims().to_vec();
        shape.push(width);
        Ok(Signature::new(rows, &shape, self.dtype()))
    }
}

fn lookup(table: &DTensor, ids: &Tensor, out: &Spec) -> Result<Tensor> {
    let vocab = table.dims()[0];
    let held = table.spec().local_block()[0].clone();
    let flat = ids.flatten_all()?;
    let values = flat.to_vec1::<u32>()?;
    if let Some(bad) = values.iter().find(|&&id| id as usize >= vocab) {
        return Error::op("embedding", format!("id {bad} is not a row of a table of {vocab} rows"));
    }
    let shape = out.local_shape();
    if held.is_empty() && vocab > 0 {
        return neutral(std::slice::from_ref(table), &shape, out.dtype());
    }
    let table = table.to_local().contiguous()?; // candle looks up in nothing else
    if held.len() == vocab {
        return Ok(table.index_select(&flat, 0)?.reshape(shape.as_slice())?);
    }
    // Rows held elsewhere are looked up as row 0 and replaced by zero, which also stops their gradient.
    let own = |&id: &u32| held.contains(&(id as usize));
    let shifted: Vec<u32> = values.iter().map(|id| if own(id) { id - held.start as u32 } else { 0 }).collect();
    let mask: Vec<u8> = values.iter().map(|id| u8::from(own(id))).collect();
    let n = values.len();
    let rows = table.index_select(&Tensor::from_vec(shifted, n, table.device())?, 0)?;
    let mask = Tensor::from_vec(mask, (n, 1), table.device())?.broadcast_as(rows.shape())?;
    Ok(mask.where_cond(&rows, &rows.zeros_like()?)?.reshape(shape.as_slice())?)
}

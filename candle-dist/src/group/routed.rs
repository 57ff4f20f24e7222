//! Exchange of any number of rows between every pair of ranks.
use super::ProcessGroup;
use crate::Result;
use crate::call::{Call, Dims, Op, total};
use candle_core::Tensor;

impl ProcessGroup {
    /// Sends rows of dim 0 to the ranks and joins the received ones in rank order: `counts[s][r]` rows go from `s` to
    /// `r`.
    ///
    /// Every rank gives the whole table of counts, in which some may be zero; the other dims are equal on all ranks.
    /// The rows for rank 0 come first in `tensor`.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_dist::{Result, World};
    ///
    /// let received = World::local(2).run(|ctx| -> Result<Vec<u32>> {
    ///     let mine = [[1u32, 2, 3], [4, 5, 6]][ctx.rank()];
    ///     let counts = [[3, 0], [1, 2]]; // rank 0 keeps all, rank 1 sends its first row to rank 0
    ///     Ok(ctx.group().all_to_all_single(&Tensor::new(&mine, &Device::Cpu)?, &counts)?.to_vec1()?)
    /// })?;
    /// assert_eq!(received, [vec![1, 2, 3, 4], vec![5, 6]]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    #[track_caller]
    pub fn all_to_all_single<C: AsRef<[usize]>>(&self, tensor: &Tensor, counts: &[C]) -> Result<Tensor> {
        self.collect(self.route(tensor, counts)?, tensor)
    }

    /// Makes the call of an exchange with these `counts`.
    #[track_caller]
    pub(super) fn route<C: AsRef<[usize]>>(&self, tensor: &Tensor, counts: &[C]) -> Result<Call> {
        let counts: Vec<Dims> = counts.iter().map(|row| Dims::from_slice(row.as_ref())).collect();
        self.check_routes(tensor, &counts)?;
        Ok(Self::routed(tensor, &counts))
    }

    /// Makes the call of an exchange with valid `counts`.
    #[track_caller]
    pub(crate) fn routed(tensor: &Tensor, counts: &[Dims]) -> Call {
        let sizes = counts.iter().cloned().collect();
        Call { dims: smallvec::smallvec![0], sizes, ..Call::on(Op::AllToAll, tensor, &[0]) }
    }

    /// Refuses counts that are not a table of this group's ranks, or that do not cut the tensor's rows.
    pub(crate) fn check_routes(&self, tensor: &Tensor, counts: &[Dims]) -> Result<()> {
        let n = self.size();
        let is_table = counts.len() == n && counts.iter().all(|row| row.len() == n);
        let countable = |r: usize| counts.iter().try_fold(0usize, |sum, row| sum.checked_add(row[r])).is_some();
        if !is_table || tensor.rank() == 0 || !(0..n).all(countable) {
            let reason =
                format!("counts {counts:?} of rows of {:?}: expected {n} counts for each of {n} ranks", tensor.dims());
            return Err(self.invalid(Op::AllToAll, reason));
        }
        if total(&counts[self.rank()]) != Some(tensor.dims()[0]) {
            let reason = format!("counts {:?} do not cut dim 0 of shape {:?}", counts[self.rank()], tensor.dims());
            return Err(self.invalid(Op::AllToAll, reason));
        }
        Ok(())
    }
}

//! Exchange of texts.
use super::ProcessGroup;
use crate::Result;
use crate::call::{Collective, Cut};
use candle_core::{Device, Tensor};

impl ProcessGroup {
    /// Returns every rank's text on every rank, in rank order.
    ///
    /// Two small collectives; one if all texts are empty.
    ///
    /// ```
    /// use candle_dist::{Result, World};
    ///
    /// let texts = World::threads(2).run(|ctx| -> Result<Vec<String>> {
    ///     ctx.group().all_gather_text(if ctx.rank() == 1 { "the disk is full" } else { "" })
    /// })?;
    /// assert_eq!(texts[0], ["", "the disk is full"]);
    /// assert_eq!(texts[0], texts[1]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    #[track_caller]
    pub fn all_gather_text(&self, text: &str) -> Result<Vec<String>> {
        let length = Tensor::new(&[text.len() as i64], &Device::Cpu)?;
        let lengths = self.all_gather(&length, 0)?.to_vec1::<i64>()?;
        let lengths: Vec<usize> = lengths.into_iter().map(|length| length as usize).collect();
        if lengths.iter().all(|&length| length == 0) {
            return Ok(vec![String::new(); lengths.len()]);
        }
        let bytes = Tensor::from_slice(text.as_bytes(), text.len(), &Device::Cpu)?;
        let mut rest =
            self.call(Collective::all_gather(Cut::new(0, &lengths))).run(&bytes)?.to_vec1::<u8>()?;
        let mut texts = Vec::with_capacity(lengths.len());
        for length in lengths {
            let tail = rest.split_off(length);
            texts.push(String::from_utf8_lossy(&rest).into_owned());
            rest = tail;
        }
        Ok(texts)
    }
}

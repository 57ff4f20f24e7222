//! The loss of a text that nothing is learned from.

use std::sync::atomic::Ordering;

use anyhow::Result;
use candle_core::{Device, Tensor};
use candle_dist::{DeviceMesh, ProcessGroup, ReduceOp};
use candle_pipe::{Runtime, StepOptions};

use super::data::TrainingData;
use super::job::Job;
use super::preference;
use super::trainer::{any, part_of};

/// What one microbatch is, on all replicas together: the sequences of each replica, and how many sequences the mean of
/// their losses stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ValidationSlot {
    rows: Vec<Vec<usize>>,
    counts: usize,
}

/// All sequences in passes of `microbatches` microbatches, with up to `rows` rows of each replica in a microbatch.
///
/// Replicas have equally many rows. Where the last sequences are less than the replicas, each replica computes each of
/// them; what fills up the last pass counts nothing.
fn passes(sequences: usize, replicas: usize, microbatches: usize, rows: usize) -> Vec<Vec<ValidationSlot>> {
    let whole = |start: usize, rows: usize| ValidationSlot {
        rows: (0..replicas)
            .map(|replica| (start + replica * rows..start + (replica + 1) * rows).collect())
            .collect(),
        counts: replicas * rows,
    };
    let alike =
        |sequence: usize, counts: usize| ValidationSlot { rows: vec![vec![sequence]; replicas], counts };
    let (mut passes, mut next) = (Vec::new(), 0);
    while sequences - next >= microbatches * replicas * rows {
        let slots = (0..microbatches).map(|slot| whole(next + slot * replicas * rows, rows));
        passes.push(slots.collect());
        next += microbatches * replicas * rows;
    }
    let mut rest: Vec<ValidationSlot> = Vec::new();
    while sequences - next >= replicas {
        rest.push(whole(next, 1));
        next += replicas;
    }
    rest.extend((next..sequences).map(|sequence| alike(sequence, 1)));
    rest.resize(rest.len().next_multiple_of(microbatches), alike(0, 0));
    passes.extend(rest.chunks(microbatches).map(<[ValidationSlot]>::to_vec));
    passes
}

/// The mean loss of all sequences that follow each other in the text, the same on all ranks; `None` if a rank is asked to stop
/// before all are computed.
///
/// Every rank of `world` calls it, which has the axes `("pp", "dp", "cp", "ep", "tp")` of the mesh.
///
/// # Errors
/// Those of the runtime.
pub(super) fn loss(
    job: &Job,
    text: &TrainingData,
    world: &ProcessGroup,
    mesh: &DeviceMesh,
    runtime: &Runtime,
) -> Result<Option<f64>> {
    let (pipeline, seq_len) = (job.pipeline, job.recipe.seq_len);
    let (own, replicas, microbatches) = (part_of(mesh, job)?, pipeline.parts(), pipeline.microbatches);
    let rows = (job.recipe.batch / (replicas * microbatches)).max(1);
    let (mut sum, sequences) = (0.0, text.sequences(seq_len));
    for slots in passes(sequences, replicas, microbatches, rows) {
        // Who is asked to stop has no time for the rest.
        if let [true] = any(world, [job.stop.load(Ordering::Relaxed)])? {
            return Ok(None);
        }
        let of_replica = |replica: usize| slots.iter().flat_map(move |slot| &slot.rows[replica]);
        let all: Vec<usize> = (0..replicas).flat_map(of_replica).copied().collect();
        let batch = text.pick(&all, seq_len, world.device())?;
        let (batch, _) = preference::part(runtime, mesh.axis_group("pp")?, &batch, 0..all.len(), &own, 0)?;
        let losses = runtime.evaluate(&batch, &StepOptions::default().outputs(false))?.step.losses;
        for (slot, loss) in slots.iter().zip(losses) {
            sum += slot.counts as f64 * f64::from(loss.to_device(&Device::Cpu)?.to_scalar::<f32>()?);
        }
    }
    // Each rank of the last stages has the mean of its replica's rows, or of all where replicas compute together.
    let sums = world.all_reduce(&Tensor::new(sum, world.device())?, ReduceOp::Sum)?.to_scalar::<f64>()?;
    Ok(Some(sums / (replicas * pipeline.cp * pipeline.tp * sequences) as f64))
}

#[cfg(test)]
mod tests {
    use super::passes;

    #[test]
    fn every_sequence_counts_once_in_microbatches_of_equal_rows() {
        for sequences in 1..30 {
            for (replicas, microbatches, rows) in [(1, 1, 1), (1, 1, 4), (2, 1, 2), (3, 2, 2), (2, 5, 3)] {
                let mut counted = vec![0.0; sequences];
                for pass in passes(sequences, replicas, microbatches, rows) {
                    assert_eq!(pass.len(), microbatches);
                    for slot in &pass {
                        assert!(
                            slot.rows.len() == replicas
                                && slot.rows.iter().all(|rows| rows.len() == pass[0].rows[0].len())
                        );
                        let share = slot.counts as f64 / slot.rows.concat().len() as f64;
                        slot.rows.concat().into_iter().for_each(|sequence| counted[sequence] += share);
                    }
                }
                assert!(
                    counted.iter().all(|count| (count - 1.0).abs() < 1e-9),
                    "{sequences} {replicas} {counted:?}"
                );
            }
        }
    }
}

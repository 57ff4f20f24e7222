#![allow(clippy::unwrap_used)] // a panic is how a test fails
use super::*;
use crate::backend::{Fresh, ReduceOp, Tensors};
use crate::{Collective, Cut, ProcessGroup, World};
use candle_core::cpu_backend::CpuDevice;
use candle_core::{CpuStorage, DType, Device, Tensor};
use proptest::prelude::*;
use smallvec::smallvec;

/// Returns what all ranks would receive if NCCL executed the plans on the host; sums only.
fn moved(plans: &[TransferPlan], sent: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let sum = |start: usize, len: usize| -> Vec<f32> {
        (start..start + len).map(|i| sent.iter().map(|buffer| buffer[i]).sum()).collect()
    };
    let receive = |me: usize| -> Vec<f32> {
        match &plans[me].transfer {
            FlatTransfer::AllReduce { len } => sum(0, *len),
            FlatTransfer::Broadcast { root, len } => sent[*root][..*len].to_vec(),
            FlatTransfer::Reduce { root, len } => {
                if me == *root {
                    sum(0, *len)
                } else {
                    Vec::new()
                }
            }
            FlatTransfer::AllGather { len } => {
                sent.iter().flat_map(|buffer| buffer[..*len].to_vec()).collect()
            }
            FlatTransfer::ReduceScatter { len } => sum(me * len, *len),
            FlatTransfer::Reduces(spans) => {
                spans.iter().find(|span| span.peer == me).map_or(Vec::new(), |span| sum(span.start, span.len))
            }
            FlatTransfer::SendReceive { receives, .. } => {
                let mut buffer = vec![f32::NAN; plans[me].received];
                for to in receives {
                    let FlatTransfer::SendReceive { sends, .. } = &plans[to.peer].transfer else {
                        panic!("ranks differ")
                    };
                    let from = sends.iter().find(|from| from.peer == me).expect("a send for each receive");
                    assert_eq!(from.len, to.len, "the sender and the receiver count alike");
                    buffer[to.start..to.start + to.len]
                        .copy_from_slice(&sent[to.peer][from.start..from.start + from.len]);
                }
                buffer
            }
        }
    };
    let count = |spans: &[BufferSpan], peer: usize| spans.iter().filter(|span| span.peer == peer).count();
    for (me, plan) in plans.iter().enumerate() {
        let FlatTransfer::SendReceive { sends, .. } = &plan.transfer else { continue };
        for span in sends {
            let FlatTransfer::SendReceive { receives, .. } = &plans[span.peer].transfer else {
                panic!("ranks differ")
            };
            assert_eq!((count(sends, span.peer), count(receives, me)), (1, 1), "a receive for each send");
        }
    }
    (0..plans.len()).map(receive).collect()
}

fn packed(moves: &StripCopies, source: &CpuStorage, offset: usize) -> CpuStorage {
    CpuStorage::copy_strips(&CpuDevice, &[moves.buffer(source, offset)]).unwrap().remove(0)
}

/// Returns the results of the ranks for their `i`-th tensors by the plans.
fn planned(calls: &[Call], inputs: &[Tensors], i: usize) -> Vec<Option<Tensor>> {
    let shape = |me: usize| {
        inputs[me].get(i).map_or(calls[me].shape.clone(), |tensor| Dims::from_slice(tensor.dims()))
    };
    let plans: Vec<_> =
        (0..calls.len()).map(|me| TransferPlan::new(&calls[me], i, me, &shape(me)).unwrap()).collect();
    let send = |me: usize| -> Vec<f32> {
        let Some(tensor) = inputs[me].get(i) else { return Vec::new() };
        let (storage, layout) = tensor.storage_and_layout();
        let storage = CpuStorage::of(&storage).unwrap();
        let (start, end) = layout.contiguous_offsets().unwrap();
        match &plans[me].pack {
            Some(moves) => packed(moves, storage, start).as_slice::<f32>().unwrap().to_vec(),
            None => storage.as_slice::<f32>().unwrap()[start..end].to_vec(),
        }
    };
    let sent: Vec<_> = (0..calls.len()).map(send).collect();
    let land = |(plan, received): (&TransferPlan, Vec<f32>)| {
        let shape = plan.shape.clone()?;
        assert_eq!(received.len(), plan.received);
        let received = CpuStorage::F32(received);
        let made = plan.unpack.as_ref().map_or(received.clone(), |moves| packed(moves, &received, 0));
        Some(Fresh::host(made, shape.as_slice()).into_tensor())
    };
    plans.iter().zip(moved(&plans, &sent)).map(land).collect()
}

/// Compares the results of the threads backend with those of the plans.
fn check(n: usize, call: impl Fn(usize) -> (Call, Tensors) + Sync) {
    let (calls, inputs): (Vec<_>, Vec<_>) = (0..n).map(&call).unzip();
    let run = |group: &ProcessGroup| -> crate::Result<Vec<Tensor>> {
        let (call, tensors) = call(group.rank());
        let made = group.engage(call, 0, |backend, call| backend.run(call, tensors, Tensors::new()))?;
        Ok(made.into_iter().map(Fresh::into_tensor).collect())
    };
    let expected = World::threads(n).run(|ctx| run(ctx.group())).unwrap();
    for i in 0..calls[0].count() {
        for (me, made) in planned(&calls, &inputs, i).into_iter().enumerate() {
            let made = made
                .map(|made| (made.dims().to_vec(), made.flatten_all().unwrap().to_vec1::<f32>().unwrap()));
            let want = expected[me].get(i);
            let want = want
                .map(|want| (want.dims().to_vec(), want.flatten_all().unwrap().to_vec1::<f32>().unwrap()));
            assert_eq!(made, want, "rank {me} of {n}, tensor {i} of {}", calls[me]);
        }
    }
}

fn tensor(rank: usize, dims: &[usize]) -> Tensor {
    let count = dims.iter().product::<usize>() as u32;
    let data = (0..count).map(|i| (100 * rank as u32 + i) as f32).collect();
    Tensor::from_vec::<_, f32>(data, dims, &Device::Cpu).unwrap()
}

fn with(dims: &[usize], dim: usize, len: usize) -> Dims {
    let mut dims = Dims::from_slice(dims);
    dims[dim] = len;
    dims
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    // Two dims besides the one that is cut, sizes that include zeros, every root.
    #[test]
    fn plans_move_what_the_local_engine_moves(
        sizes in proptest::collection::vec(0usize..4, 2..5), even in any::<bool>(), dims in [0usize..3, 1usize..3, 1usize..3],
        dim in 0usize..3, other in 1usize..3, root in 0usize..4,
    ) {
        let n = sizes.len();
        let sizes: Dims = sizes.iter().map(|&size| if even { sizes[0] } else { size }).collect();
        let (root, other) = (root % n, (dim + other) % 3);
        let whole = with(&dims, dim, sizes.iter().sum());
        let cut = Cut { dim, sizes: sizes.clone() };
        let op = ReduceOp::Sum;
        for collective in [Collective::AllReduce(op), Collective::Broadcast { root }, Collective::Reduce { op, root }] {
            check(n, |rank| {
                let x = tensor(rank, &whole);
                (Call::on(collective.clone(), &x), smallvec![x])
            });
        }
        for collective in [Collective::all_gather(cut.clone()), Collective::Gather { cut: cut.clone(), root }] {
            check(n, |rank| {
                let x = tensor(rank, &with(&dims, dim, sizes[rank]));
                (Call::on(collective.clone(), &x), smallvec![x])
            });
        }
        check(n, |rank| {
            let x = tensor(rank, &whole);
            (Call::on(Collective::reduce_scatter(cut.clone(), op), &x), smallvec![x])
        });
        check(n, |rank| {
            let call = Call::of(Collective::Scatter { cut: cut.clone(), root }, DType::F32, &whole);
            let mine = (rank == root).then(|| tensor(rank, &whole));
            (call, mine.into_iter().collect())
        });
        let concat = Cut { dim: other, sizes: (0..n).map(|rank| (sizes[rank] + rank) % 3).collect() };
        check(n, |rank| {
            let x = tensor(rank, &with(&whole, other, concat.sizes[rank]));
            (Call::on(Collective::AllToAll { split: cut.clone(), concat: concat.clone() }, &x), smallvec![x])
        });
        let counts: Vec<Dims> = (0..n).map(|s| (0..n).map(|r| (sizes[r] * s + r) % 4).collect()).collect();
        check(n, |rank| {
            let x = tensor(rank, &[counts[rank].iter().sum(), 2]);
            (Call::on(Collective::AllToAllSingle(counts.clone()), &x), smallvec![x])
        });
    }
}

#[test]
fn every_tensor_of_a_coalesced_call_has_its_own_cut() {
    check(3, |rank| {
        let tensors: Tensors = smallvec![tensor(rank, &[2, 3]), tensor(rank + 5, &[6, 2])];
        let cuts = smallvec![Cut::even(1, 1, 3), Cut::even(0, 2, 3)];
        (Call::on_all(Collective::ReduceScatter(cuts, ReduceOp::Sum), &tensors), tensors)
    });
}

#[test]
fn even_pieces_need_one_call_and_whole_rows_no_packing() {
    let x = tensor(0, &[4, 3]);
    let gather = Call::on(Collective::all_gather(Cut::even(0, 4, 2)), &x);
    let plan = TransferPlan::new(&gather, 0, 1, x.dims()).unwrap();
    assert_eq!((plan.transfer, plan.pack, plan.unpack), (FlatTransfer::AllGather { len: 12 }, None, None));
    let scatter = Call::on(Collective::reduce_scatter(Cut::even(0, 2, 2), ReduceOp::Sum), &x);
    let plan = TransferPlan::new(&scatter, 0, 1, x.dims()).unwrap();
    assert_eq!((plan.transfer, plan.pack, plan.unpack), (FlatTransfer::ReduceScatter { len: 6 }, None, None));
}

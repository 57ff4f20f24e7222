//! scratch
use candle_core::{DType, Device, Tensor};
use candle_dist::{ReduceOp, Result, World};
use std::time::Instant;
#[global_allocator]
static A: mimalloc::MiMalloc = mimalloc::MiMalloc;
fn main() {
    let n: usize = std::env::args().nth(1).map_or(2, |s| s.parse().unwrap());
    let rows = World::local(n)
        .run(|ctx| -> Result<Vec<(String, usize, f64)>> {
            let g = ctx.group();
            let mut rows = vec![];
            for bytes in [4096usize, 262144, 4 << 20, 64 << 20] {
                let x = Tensor::ones(bytes / 4, DType::F32, &Device::Cpu)?.affine(1.0, g.rank() as f64)?;
                let rounds = (400_000_000 / bytes).clamp(5, 3000);
                type F<'a> = Box<dyn Fn() -> Result<()> + 'a>;
                let ops: Vec<(&str, F<'_>)> = vec![
                    ("all_reduce", Box::new(|| g.all_reduce(&x, ReduceOp::Sum).map(drop))),
                    ("all_gather", Box::new(|| g.all_gather(&x, 0).map(drop))),
                    ("reduce_scatter", Box::new(|| g.reduce_scatter(&x, 0, ReduceOp::Sum).map(drop))),
                    (
                        "all_to_all",
                        Box::new(|| {
                            let y = x.reshape((n, ()))?;
                            g.all_to_all(&y, 0, 1).map(drop)
                        }),
                    ),
                    ("broadcast", Box::new(|| g.broadcast(&x, 0).map(drop))),
                    ("barrier", Box::new(|| g.barrier())),
                ];
                for (name, op) in ops {
                    let mut t = vec![];
                    for _ in 0..rounds {
                        g.barrier()?;
                        let s = Instant::now();
                        op()?;
                        t.push(s.elapsed().as_secs_f64() * 1e6);
                    }
                    t.sort_by(f64::total_cmp);
                    rows.push((name.to_string(), bytes, t[t.len() / 2]));
                }
            }
            Ok(rows)
        })
        .unwrap();
    for (name, bytes, us) in &rows[0] {
        println!("{name:15} {bytes:10} {us:10.1}");
    }
}

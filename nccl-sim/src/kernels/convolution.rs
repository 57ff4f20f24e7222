//! Convolutions as candle's backend calls them: windows as rows of a matrix and back, and transposed convolutions.
use super::{Kernel, info, load};
use crate::engine::Exec;
use crate::number::{Element, bytes, with_type};

/// How a window moves along one dim.
#[derive(Clone, Copy)]
struct Steps {
    stride: u64,
    padding: u64,
    dilation: u64,
}

impl Steps {
    /// The element of the input below element `at` of the window at `place`; `None` in the padding.
    fn below(self, place: u64, at: u64, len: u64) -> Option<u64> {
        (place * self.stride + at * self.dilation).checked_sub(self.padding).filter(|&below| below < len)
    }

    /// The place whose element `at` of the window is at `here`, if one of `len` is.
    fn place(self, here: u64, at: u64, len: u64) -> Option<u64> {
        let steps = (here + self.padding).checked_sub(at * self.dilation)?;
        Some(steps / self.stride).filter(|&place| steps.is_multiple_of(self.stride) && place < len)
    }
}

/// Indexes of all elements of a shape, in row-major order.
fn each<const N: usize>(shape: [u64; N]) -> impl Iterator<Item = [u64; N]> {
    (0..shape.iter().product()).map(move |mut at: u64| {
        let mut index = [0; N];
        for (i, &size) in index.iter_mut().zip(&shape).rev() {
            (*i, at) = (at % size, at / size);
        }
        index
    })
}

fn offset(index: &[u64], strides: &[u64]) -> usize {
    index.iter().zip(strides).map(|(i, stride)| (i * stride) as usize).sum()
}

/// Writes the elements at some offsets, and zeros where there is none.
fn put<T: Element>(exec: &mut Exec<'_>, from: u64, at: &[Option<usize>], to: u64) -> Option<()> {
    let places: Vec<usize> = at.iter().flatten().copied().collect();
    let mut found = load::<T>(exec, from, &places)?.into_iter();
    let out = at.iter().map(|at| at.and_then(|_| found.next()).unwrap_or(T::from_int(0)));
    exec.write(to, &bytes(out.collect::<Vec<T>>()));
    Some(())
}

/// `[b, c, l]` to `[b, places, c, window]`.
pub(super) fn im2col1d(kernel: &Kernel, exec: &mut Exec<'_>, v: &[u64]) -> Option<()> {
    let steps = Steps { stride: v[3], padding: v[4], dilation: v[5] };
    let layout = info(exec, v[6], 3, 2)?;
    let (dims, strides) = (&layout[0], &layout[1]);
    let of = |[b, place, c, at]: [u64; 4]| {
        steps.below(place, at, dims[2]).map(|below| offset(&[b, c, below], strides))
    };
    let at: Vec<Option<usize>> = each([dims[0], v[1], dims[1], v[2]]).map(of).collect();
    with_type!(kernel.ty, T => put::<T>(exec, v[7], &at, v[8]))
}

/// `[b, c, h, w]` to `[b, places in h, places in w, c, window in h, window in w]`.
pub(super) fn im2col(kernel: &Kernel, exec: &mut Exec<'_>, v: &[u64]) -> Option<()> {
    let steps = Steps { stride: v[5], padding: v[6], dilation: v[7] };
    let layout = info(exec, v[8], 4, 2)?;
    let (dims, strides) = (&layout[0], &layout[1]);
    let of = |[b, y, x, c, at_y, at_x]: [u64; 6]| {
        let (y, x) = (steps.below(y, at_y, dims[2])?, steps.below(x, at_x, dims[3])?);
        Some(offset(&[b, c, y, x], strides))
    };
    let at: Vec<Option<usize>> = each([dims[0], v[1], v[2], dims[1], v[3], v[4]]).map(of).collect();
    with_type!(kernel.ty, T => put::<T>(exec, v[9], &at, v[10]))
}

/// Sums of products of elements of two operands, one for each list of pairs of offsets.
fn sums<T: Element>(exec: &mut Exec<'_>, [a, b]: [u64; 2], pairs: &[Vec<[usize; 2]>]) -> Option<Vec<T>> {
    let mut all = |base: u64, side: usize| {
        let at: Vec<usize> = pairs.iter().flatten().map(|pair| pair[side]).collect();
        load::<T>(exec, base, &at)
    };
    let mut products = all(a, 0)?.into_iter().zip(all(b, 1)?);
    let sum = |pairs: &Vec<[usize; 2]>| {
        T::from_float(products.by_ref().take(pairs.len()).map(|(a, b)| a.float() * b.float()).sum())
    };
    Some(pairs.iter().map(sum).collect())
}

/// `[b, places, c, window]`, contiguous, to `[b, c, l]`: the sum of the windows over each element.
pub(super) fn col2im1d(kernel: &Kernel, exec: &mut Exec<'_>, v: &[u64]) -> Option<()> {
    let &[count, len, places, channels, window, stride, from, to] = v else { return None };
    let steps = Steps { stride, padding: 0, dilation: 1 };
    let batch = count / (channels * len);
    with_type!(kernel.ty, T => {
        let mut out = Vec::new();
        for [b, c, here] in each([batch, channels, len]) {
            let at = |at: u64| {
                let place = steps.place(here, at, places)?;
                Some((((b * places + place) * channels + c) * window + at) as usize)
            };
            let at: Vec<usize> = (0..window).filter_map(at).collect();
            out.push(T::from_float(load::<T>(exec, from, &at)?.into_iter().map(Element::float).sum()));
        }
        exec.write(to, &bytes(out));
    });
    Some(())
}

/// `[b, c, l]` and a kernel `[c, out, window]` to `[b, out, v[1]]`.
pub(super) fn conv_transpose1d(kernel: &Kernel, exec: &mut Exec<'_>, v: &[u64]) -> Option<()> {
    let steps = Steps { stride: v[2], padding: v[3], dilation: v[5] };
    let layout = info(exec, v[6], 3, 4)?;
    let [dims, strides, kernels, kernel_strides] = &layout[..] else { return None };
    let of = |[b, out, here]: [u64; 3]| {
        let at = |at: u64| Some((at, steps.place(here, at, dims[2])?));
        let windows = (0..kernels[2]).filter_map(at);
        let all = windows.flat_map(|(at, place)| {
            (0..dims[1])
                .map(move |c| [offset(&[b, c, place], strides), offset(&[c, out, at], kernel_strides)])
        });
        all.collect::<Vec<_>>()
    };
    let pairs: Vec<_> = each([dims[0], kernels[1], v[1]]).map(of).collect();
    with_type!(kernel.ty, T => {
        let out = sums::<T>(exec, [v[7], v[8]], &pairs)?;
        exec.write(v[9], &bytes(out));
    });
    Some(())
}

/// `[b, c, h, w]` and a kernel `[c, out, window in h, window in w]` to `[b, out, v[2], v[1]]`.
pub(super) fn conv_transpose2d(kernel: &Kernel, exec: &mut Exec<'_>, v: &[u64]) -> Option<()> {
    let steps = Steps { stride: v[3], padding: v[4], dilation: v[6] };
    let layout = info(exec, v[7], 4, 4)?;
    let [dims, strides, kernels, kernel_strides] = &layout[..] else { return None };
    let of = |[b, out, y, x]: [u64; 4]| {
        let at = |[at_y, at_x]: [u64; 2]| {
            Some(([at_y, at_x], [steps.place(y, at_y, dims[2])?, steps.place(x, at_x, dims[3])?]))
        };
        let windows = each([kernels[2], kernels[3]]).filter_map(at);
        let all = windows.flat_map(|([at_y, at_x], [y, x])| {
            let pair =
                move |c| [offset(&[b, c, y, x], strides), offset(&[c, out, at_y, at_x], kernel_strides)];
            (0..dims[1]).map(pair)
        });
        all.collect::<Vec<_>>()
    };
    let pairs: Vec<_> = each([dims[0], kernels[1], v[2], v[1]]).map(of).collect();
    with_type!(kernel.ty, T => {
        let out = sums::<T>(exec, [v[8], v[9]], &pairs)?;
        exec.write(v[10], &bytes(out));
    });
    Some(())
}

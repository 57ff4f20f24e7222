//! The random draws of layers: one stream for each use, the same when a part of a model runs a second time.
use super::Stream;
use candle_core::bail;
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

thread_local! {
    /// The active runs of parts of a model, the innermost last.
    static RUNS: RefCell<Vec<DrawRun>> = const { RefCell::new(Vec::new()) };
}

enum DrawRun {
    /// A run at a place.
    Place(DrawSite),
    /// A run whose draws are recorded.
    First(Vec<Stream>),
    /// A run that repeats these draws.
    Again { draws: Draws, next: usize },
}

struct DrawSite {
    name: String,
    /// The digest of the names of this place and of those around it.
    id: u64,
    call: Option<usize>,
    rows: Range<usize>,
    uses: Vec<LayerUse>,
}

/// The number of uses of one layer in one mode.
struct LayerUse {
    layer: u64,
    /// The step and the first row, if the caller names one.
    mode: (u64, Option<usize>),
    count: u64,
}

/// The random draws of one run of a part of a model, to repeat in another run that must compute the same numbers.
///
/// `recompute` of candle-shard and the stages of candle-pipe do this themselves. `Draws` is for other code that computes a
/// part twice, and for code that names the places of a model.
///
/// ```
/// use candle_dist_kernels::random::{Draws, RandomLayer};
///
/// let layer = RandomLayer::new(1, "dropout");
/// let draw = || layer.draw((0, None), || 0, |stream, _| Ok(stream));
/// let run = || Draws::at("block", None, 0..4, || candle_core::Result::Ok([draw()?, draw()?]));
/// let (first, draws) = Draws::of(run)?;
/// assert_ne!(first[0], first[1]); // two uses
/// assert_eq!(draws.again(|| candle_core::Result::Ok([draw()?, draw()?]))?, first);
/// assert_eq!(run()?, first); // it is the place that counts, not the number of runs
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Draws(Arc<[Stream]>);

impl Draws {
    /// Runs `f` and returns its result with its draws.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn of<T, E>(f: impl FnOnce() -> Result<T, E>) -> Result<(T, Self), E> {
        let (made, run) = within(DrawRun::First(Vec::new()), f);
        match run {
            Some(DrawRun::First(drawn)) => Ok((made?, Self(drawn.into()))),
            _ => Ok((made?, Self::default())),
        }
    }

    /// Runs `f` with these draws and returns its result.
    ///
    /// # Errors
    /// Those of `f`. A random layer in `f` fails if the first run had fewer draws.
    pub fn again<T, E>(&self, f: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        within(DrawRun::Again { draws: self.clone(), next: 0 }, f).0
    }

    /// Runs `f`, the part of a model called `name`, on the rows `rows` of a batch. Places nest.
    ///
    /// Within it the uses of each layer count from 0, so the draws do not depend on earlier runs. A layer draws other
    /// numbers at each place; those of its name alone where it is built, if its name is within that of the place. If several places share the layers that are built at the
    /// place `name`, `call` is the number of this one; else it is `None`.
    ///
    /// Nodes of candle-pipe run, and are built, at the place of their name.
    pub fn at<R>(name: &str, call: Option<usize>, rows: Range<usize>, f: impl FnOnce() -> R) -> R {
        let bytes = here().to_le_bytes();
        let id = bytes.into_iter().chain(name.bytes()).fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        within(DrawRun::Place(DrawSite { name: name.into(), id, call, rows, uses: Vec::new() }), f).0
    }

    /// Returns the rows of the present place; `None` outside of places.
    pub fn rows() -> Option<Range<usize>> {
        RUNS.with_borrow(|runs| runs.iter().rev().find_map(DrawRun::place).map(|place| place.rows.clone()))
    }

    /// Returns whether a part of a model is being computed again.
    ///
    /// Layers that change their state in a forward pass, such as running statistics, must not do so again.
    pub fn are_repeated() -> bool {
        RUNS.with_borrow(|runs| runs.iter().any(|run| matches!(run, DrawRun::Again { .. })))
    }
}

/// Returns the id of the innermost place; 0 outside of places.
fn here() -> u64 {
    RUNS.with_borrow(|runs| runs.iter().rev().find_map(DrawRun::place).map_or(0, |place| place.id))
}

impl DrawRun {
    fn place(&self) -> Option<&DrawSite> {
        match self {
            Self::Place(place) => Some(place),
            _ => None,
        }
    }
}

/// Runs `f` within a run and returns both. If `f` panics, the run ends too.
fn within<T>(run: DrawRun, f: impl FnOnce() -> T) -> (T, Option<DrawRun>) {
    struct Outer(usize);
    impl Drop for Outer {
        fn drop(&mut self) {
            RUNS.with_borrow_mut(|runs| runs.truncate(self.0));
        }
    }
    let _outer = Outer(RUNS.with_borrow(Vec::len));
    RUNS.with_borrow_mut(|runs| runs.push(run));
    let made = f();
    (made, RUNS.with_borrow_mut(Vec::pop))
}

/// The randomness of one layer, such as a dropout: its stream, and the place where it is built. Copies are the same layer.
///
/// A use draws from the layer's stream, folded with the place, with the number of the call, and with the number of earlier
/// uses at the place. The place is left out where it says nothing new: where the layer is built, if the name of the layer is
/// within that of the place.
#[derive(Debug, Clone, Copy)]
pub struct RandomLayer {
    stream: Stream,
    id: u64,
    /// The place whose name is a part of its own.
    home: Option<u64>,
}

impl RandomLayer {
    /// Creates the layer called `name` at the present place.
    pub fn new(seed: u64, name: &str) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let is_within = |place: &DrawSite| format!(".{name}.").contains(&format!(".{}.", place.name));
        let home = RUNS.with_borrow(|runs| match runs.iter().rev().find_map(DrawRun::place) {
            None => Some(0),
            Some(place) => is_within(place).then_some(place.id),
        });
        Self { stream: Stream::new(seed, name), id: NEXT.fetch_add(1, Ordering::Relaxed), home }
    }

    /// Returns a number that no other layer of this process has.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns the stream of a use.
    ///
    /// `mode` is the step, and the first row if the caller names one. Uses of other modes count apart. `outside` returns
    /// the number of earlier uses outside of places. `of` derives the stream of a mode from the layer's and the rows of
    /// the place.
    ///
    /// # Errors
    /// Those of `of`, and if a part of a model that is computed again has more uses than the first time.
    pub fn draw(
        &self,
        mode: (u64, Option<usize>),
        outside: impl FnOnce() -> u64,
        of: impl FnOnce(Stream, Option<Range<usize>>) -> candle_core::Result<Stream>,
    ) -> candle_core::Result<Stream> {
        RUNS.with_borrow_mut(|runs| {
            let again = runs.iter().rposition(|run| matches!(run, DrawRun::Again { .. }));
            let stream = match again.map(|at| &mut runs[at]) {
                Some(DrawRun::Again { draws, next }) => {
                    *next += 1;
                    let Some(&drawn) = draws.0.get(*next - 1) else {
                        bail!(
                            "dropout: a part of a model drew more masks when it was computed again; it must do the same each \
                             time"
                        );
                    };
                    drawn
                }
                _ => {
                    let place = runs.iter_mut().rev().find_map(|run| match run {
                        DrawRun::Place(place) => Some(place),
                        _ => None,
                    });
                    match place {
                        Some(place) => place.fold(self, of(self.stream, Some(place.rows.clone()))?, mode),
                        None => used(self.at(0, of(self.stream, None)?), outside()),
                    }
                }
            };
            for run in &mut runs[again.map_or(0, |at| at + 1)..] {
                if let DrawRun::First(drawn) = run {
                    drawn.push(stream);
                }
            }
            Ok(stream)
        })
    }

    /// Folds the place into a stream, unless the layer is at home there.
    fn at(&self, place: u64, stream: Stream) -> Stream {
        if self.home == Some(place) { stream } else { stream.fold(place) }
    }
}

impl DrawSite {
    /// Folds the place, the call and the number of earlier uses into the stream of a layer, and counts the use.
    fn fold(&mut self, layer: &RandomLayer, stream: Stream, mode: (u64, Option<usize>)) -> Stream {
        let known = self.uses.iter_mut().find(|known| known.layer == layer.id && known.mode == mode);
        let count = match known {
            Some(known) => {
                known.count += 1;
                known.count
            }
            None => {
                self.uses.push(LayerUse { layer: layer.id, mode, count: 0 });
                0
            }
        };
        let stream = layer.at(self.id, stream);
        match (self.call, count) {
            // The numbers of an uncut model that counts these uses in one row.
            (None, _) => used(stream, count),
            (Some(call), 0) => used(stream, call as u64),
            (Some(call), _) => stream.fold(call as u64).fold(count),
        }
    }
}

/// Folds a number into a stream; 0 leaves it is.
fn used(stream: Stream, number: u64) -> Stream {
    if number == 0 { stream } else { stream.fold(number) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::{Draws, RandomLayer, Stream};
    use std::collections::HashSet;

    fn draw(layer: &RandomLayer) -> Stream {
        layer.draw((0, None), || 0, |stream, _| Ok(stream)).unwrap()
    }

    #[test]
    fn a_layer_that_is_built_at_its_place_draws_as_outside_of_places() {
        let here = RandomLayer::new(1, "model.node.a");
        let there = Draws::at("node", None, 0..1, || RandomLayer::new(1, "model.node.a"));
        let used = Draws::at("node", None, 0..1, || [draw(&there), draw(&there)]);
        assert_eq!(used, [draw(&here), draw(&here).fold(1)]);
        assert_ne!(Draws::at("node", None, 0..1, || draw(&here)), draw(&here));
    }

    #[test]
    fn places_calls_and_uses_never_share_a_stream() {
        let layer = RandomLayer::new(1, "a");
        let shared = Draws::at("shared", None, 0..1, || RandomLayer::new(1, "shared.a"));
        let twice = |layer: &RandomLayer| [draw(layer), draw(layer), draw(layer)];
        let mut streams = Vec::new();
        for name in ["x", "y", "z"] {
            streams.extend(Draws::at(name, None, 0..1, || twice(&layer)));
            streams.extend(Draws::at("outer", None, 0..1, || Draws::at(name, None, 0..1, || twice(&layer))));
        }
        // Layers of one name that several places build.
        for name in ["v", "w"] {
            streams.extend(Draws::at(name, None, 0..1, || twice(&RandomLayer::new(1, "a"))));
        }
        for call in 0..3 {
            streams.extend(Draws::at("shared", Some(call), 0..1, || twice(&shared)));
        }
        assert_eq!(streams.iter().collect::<HashSet<_>>().len(), streams.len());
        // One use in each call is numbered as in an uncut model.
        let first = Draws::at("shared", Some(0), 0..1, || draw(&shared));
        assert_eq!(Draws::at("shared", Some(2), 0..1, || draw(&shared)), first.fold(2));
    }

    #[test]
    fn modes_count_apart() {
        let layer = Draws::at("node", None, 0..1, || RandomLayer::new(1, "a"));
        let rows =
            |first| layer.draw((0, Some(first)), || 0, |stream, _| Ok(stream.skip(first as u64))).unwrap();
        let [a, b, c, d] = Draws::at("node", None, 0..1, || [rows(0), rows(3), rows(0), rows(3)]);
        assert_eq!([b, d], [a.skip(3), c.skip(3)]);
        assert_ne!(a, c);
    }
}

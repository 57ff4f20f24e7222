//! Slices of the host as arguments of kernels.
use crate::compiled::{DeviceText, ParameterKind};
use crate::launch::{FaultKind, LaunchFault, LaunchShape, TextMemory};
use half::{bf16, f16};

/// A number that is its bytes.
pub trait PlainNumber: Copy {
    /// Adds its bytes.
    fn push(self, bytes: &mut Vec<u8>);
    /// Returns the number of these bytes.
    fn from_bytes(bytes: &[u8]) -> Self;
}

macro_rules! plain {
    ($($t:ty),*) => {$(impl PlainNumber for $t {
        fn push(self, bytes: &mut Vec<u8>) {
            bytes.extend(self.to_ne_bytes());
        }

        fn from_bytes(bytes: &[u8]) -> Self {
            let mut own = [0; size_of::<$t>()];
            own.copy_from_slice(bytes);
            Self::from_ne_bytes(own)
        }
    })*};
}
plain!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, f16, bf16);

/// What takes the bytes that a kernel has written.
type WriteBack<'a> = Box<dyn FnMut(&[u8]) + 'a>;

/// An argument of a kernel.
pub struct TextArgument<'a> {
    kind: ParameterKind,
    bytes: Vec<u8>,
    /// The bytes before the place that a pointer leads to.
    before: usize,
    back: Option<WriteBack<'a>>,
}

impl<'a> TextArgument<'a> {
    /// A number.
    pub fn value(number: impl PlainNumber) -> Self {
        let mut bytes = Vec::new();
        number.push(&mut bytes);
        Self::of_bytes(bytes)
    }

    /// A structure of these bytes.
    pub fn of_bytes(bytes: Vec<u8>) -> Self {
        Self { kind: ParameterKind::Value, bytes, before: 0, back: None }
    }

    /// A pointer to constants.
    pub fn read(numbers: &[impl PlainNumber]) -> Self {
        Self::read_from(numbers, 0)
    }

    /// A pointer to the constant of this number and those behind it, as a view has it: it need not be aligned for vectors.
    pub fn read_from<T: PlainNumber>(numbers: &[T], first: usize) -> Self {
        let (bytes, before) = (bytes(numbers), first * size_of::<T>());
        Self { kind: ParameterKind::Read, bytes, before, back: None }
    }

    /// A pointer to what the kernel writes.
    pub fn written<T: PlainNumber>(numbers: &'a mut [T]) -> Self {
        let bytes = bytes(numbers);
        let back = move |bytes: &[u8]| {
            let each = bytes.chunks_exact(size_of::<T>());
            numbers.iter_mut().zip(each).for_each(|(number, bytes)| *number = T::from_bytes(bytes));
        };
        Self { kind: ParameterKind::Written, bytes, before: 0, back: Some(Box::new(back)) }
    }
}

fn bytes(numbers: &[impl PlainNumber]) -> Vec<u8> {
    let mut bytes = Vec::new();
    numbers.iter().for_each(|number| number.push(&mut bytes));
    bytes
}

impl DeviceText {
    /// Runs a kernel on slices of the host. A slice without elements is a null pointer.
    ///
    /// # Errors
    /// If there is no such kernel, its parameters are others, it writes what is only read, or what [`launch`](Self::launch) finds.
    pub fn run(
        &self,
        kernel: &str,
        shape: LaunchShape,
        arguments: &mut [TextArgument<'_>],
    ) -> Result<(), LaunchFault> {
        let wrong = |text: String| LaunchFault { kind: FaultKind::Parameters, text };
        let parameters = self.parameters(kernel).unwrap_or_default();
        for (at, (given, wanted)) in arguments.iter().zip(parameters).enumerate() {
            if given.kind != wanted.kind {
                return Err(wrong(format!(
                    "parameter {at} of {kernel} is {:?}, not {:?}",
                    wanted.kind, given.kind
                )));
            }
        }
        // Memory of a device is aligned to 256 bytes.
        let room = |bytes: &[u8]| vec![Aligned([0xff; 256]); bytes.len().div_ceil(256)];
        let mut held: Vec<Vec<Aligned>> = arguments
            .iter()
            .map(
                |argument| {
                    if argument.kind == ParameterKind::Value { Vec::new() } else { room(&argument.bytes) }
                },
            )
            .collect();
        let (mut values, mut memory) = (Vec::new(), Vec::new());
        for (argument, held) in arguments.iter().zip(&mut held) {
            if argument.kind == ParameterKind::Value {
                values.push(argument.bytes.clone());
                continue;
            }
            for (to, from) in held.iter_mut().zip(argument.bytes.chunks(256)) {
                to.0[..from.len()].copy_from_slice(from);
            }
            let start = if held.is_empty() { 0 } else { held.as_mut_ptr() as usize };
            values.push((start + argument.before).to_ne_bytes().to_vec());
            if start != 0 {
                memory.push(TextMemory::new(start, argument.bytes.len()));
            }
        }
        // SAFETY: the regions are the vectors above, which nothing else uses.
        unsafe { self.launch(kernel, shape, &values, &mut memory) }?;
        for (argument, held) in arguments.iter_mut().zip(&held) {
            let used = memory.iter().find(|region| region.start == held.as_ptr() as usize);
            if argument.kind == ParameterKind::Read && used.is_some_and(|region| !region.written.is_empty()) {
                return Err(wrong(format!("{kernel} writes what it is given as constants")));
            }
            if let Some(back) = &mut argument.back {
                let all: Vec<u8> = held.iter().flat_map(|held| held.0).take(argument.bytes.len()).collect();
                back(&all);
            }
        }
        Ok(())
    }
}

#[derive(Clone)]
#[repr(align(256))]
struct Aligned([u8; 256]);

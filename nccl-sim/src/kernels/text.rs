//! Kernels whose text NVRTC was given, run by the crate device-text.
//!
//! The launch may use all memory of its GPU that is allocated then. Which bytes it read and wrote is known from each access of
//! its threads, not from its parameters.
use crate::engine::Exec;
use crate::report::{Kind, fault};
use device_text::{DeviceText, FaultKind, LaunchShape, TextMemory};
use std::sync::Arc;

/// A kernel of a text.
#[derive(Clone)]
pub(crate) struct TextFunction {
    text: Arc<DeviceText>,
    pub(crate) name: String,
}

impl TextFunction {
    /// Returns the kernel of a name, if the text has it.
    pub(crate) fn named(text: Arc<DeviceText>, name: &str) -> Option<Self> {
        text.parameters(name)?;
        Some(Self { text, name: name.to_string() })
    }

    /// The sizes of the parameters.
    pub(crate) fn sizes(&self) -> Vec<usize> {
        self.text.parameters(&self.name).into_iter().flatten().map(|parameter| parameter.size).collect()
    }

    /// Runs the kernel. A fault ends it, as an error of the device would, and what it did until then stays.
    pub(crate) fn run(&self, exec: &mut Exec<'_>, shape: LaunchShape, values: &[Vec<u8>]) {
        let mut memory: Vec<TextMemory> =
            exec.live().into_iter().map(|(start, size)| TextMemory::new(start as usize, size)).collect();
        // SAFETY: the blocks are allocated, and the lock on the simulator keeps all others from them.
        let run = unsafe { self.text.launch(&self.name, shape, values, &mut memory) };
        for region in &memory {
            let ranges = |ranges: &[std::ops::Range<usize>]| -> Vec<(u64, usize)> {
                ranges.iter().map(|range| ((region.start + range.start) as u64, range.len())).collect()
            };
            for (address, len) in ranges(&region.read) {
                exec.note_read(address, len);
            }
            for (address, len) in ranges(&region.written) {
                exec.note_write(address, len);
            }
        }
        let Err(error) = run else { return };
        let kind = match error.kind {
            FaultKind::Memory => Kind::Memory,
            FaultKind::Race => Kind::Race,
            FaultKind::Unwritten => Kind::Unwritten,
            FaultKind::Parameters | FaultKind::Divergence => Kind::Misuse,
        };
        let site = exec.site().clone();
        fault(kind, site.call(), format!("{site}: {}", error.text));
    }
}

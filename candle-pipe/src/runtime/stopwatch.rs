//! The start and end times of computations.
//!
//! A CUDA device runs a kernel some time after the host has launched it. So its moments are events on the compute
//! stream, and their times are read at the end of the step. The CUDA code has not run on a GPU yet.
use super::clock::{Clock, Nanos};
use crate::Result;
use candle_core::Device;

/// A moment of this rank's step.
pub(super) enum Moment {
    /// A time of the host, by the common clock.
    Host(Nanos),
    /// An event of the device.
    #[cfg(feature = "cuda")]
    Device(cuda::Event),
}

/// Records moments while a step runs.
pub(super) struct Stopwatch {
    clock: Clock,
    #[cfg(feature = "cuda")]
    device: Option<cuda::Start>,
}

impl Stopwatch {
    /// Creates a stopwatch for computations on `device`. It waits once for a CUDA device, to relate its time to the
    /// host's.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
    pub(super) fn new(clock: Clock, device: &Device) -> Result<Self> {
        Ok(Self {
            clock,
            #[cfg(feature = "cuda")]
            device: cuda::Start::new(&clock, device)?,
        })
    }

    /// Returns the moment at which all work launched so far is done.
    pub(super) fn now(&self) -> Result<Moment> {
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.device {
            return Ok(Moment::Device(device.event()?));
        }
        Ok(Moment::Host(self.clock.now()))
    }

    /// Returns the time of a moment. Waits until a device has reached it.
    pub(super) fn time(&self, moment: &Moment) -> Result<Nanos> {
        match moment {
            Moment::Host(time) => Ok(*time),
            #[cfg(feature = "cuda")]
            Moment::Device(event) => match &self.device {
                Some(device) => device.time(event),
                None => Err(crate::Error::Pipe("an event of a device that is not measured".into())),
            },
        }
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::{Clock, Nanos};
    use crate::Result;
    use candle_core::Device;
    use candle_core::cuda_backend::WrapErr;
    use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
    use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
    use std::sync::Arc;

    /// A place in the order of a stream.
    pub(in super::super) struct Event(CudaEvent);

    /// The compute stream, with an event at a known time.
    pub(super) struct Start {
        stream: Arc<CudaStream>,
        event: CudaEvent,
        at: Nanos,
    }

    fn event(stream: &Arc<CudaStream>) -> Result<CudaEvent> {
        // cudarc's default flags record no time.
        Ok(stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).w()?)
    }

    impl Start {
        pub(super) fn new(clock: &Clock, device: &Device) -> Result<Option<Self>> {
            let Device::Cuda(device) = device else { return Ok(None) };
            let stream = device.cuda_stream();
            // All earlier work is done, so the event is reached as soon as it is recorded.
            stream.synchronize().w()?;
            let event = event(&stream)?;
            event.synchronize().w()?;
            Ok(Some(Self { stream, event, at: clock.now() }))
        }

        pub(super) fn event(&self) -> Result<Event> {
            event(&self.stream).map(Event)
        }

        pub(super) fn time(&self, Event(event): &Event) -> Result<Nanos> {
            let milliseconds = self.event.elapsed_ms(event).w()?;
            Ok(self.at + (f64::from(milliseconds) * 1e6) as Nanos)
        }
    }
}

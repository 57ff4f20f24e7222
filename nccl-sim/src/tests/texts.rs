//! Kernels that are given to NVRTC as text: their accesses are judged as those of any other work.
use super::*;
use crate::launch::*;
use crate::nvrtc::*;
use std::ffi::{CString, c_char};

/// `twice` writes twice each number that it reads; `far` writes behind the end; `much` needs shared memory.
const TEXT: &str = r#"
extern "C" __global__ void twice(int count, const float* from, float* to) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) to[at] = 2.0f * from[at];
}
extern "C" __global__ void far(int count, float* to) { to[count] = 1.0f; }
extern "C" __global__ void same(float* to) { to[0] = threadIdx.x; }
extern "C" __global__ void much(float* to) {
  DYNAMIC_SHARED(float, all);
  all[threadIdx.x] = threadIdx.x;
  __syncthreads();
  to[threadIdx.x] = all[blockDim.x - 1 - threadIdx.x];
}
"#;

/// Compiles a text with options, and returns the status and the image.
fn compiled(text: &str, options: &[&str]) -> (i32, Vec<c_char>) {
    let (text, mut program) = (CString::new(text).unwrap(), 0);
    assert_eq!(
        nvrtcCreateProgram(
            &mut program,
            text.as_ptr(),
            std::ptr::null(),
            0,
            std::ptr::null(),
            std::ptr::null()
        ),
        0
    );
    let options: Vec<CString> = options.iter().map(|&option| CString::new(option).unwrap()).collect();
    let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let status = nvrtcCompileProgram(program, pointers.len() as i32, pointers.as_ptr());
    let mut size = 0;
    assert_eq!(nvrtcGetCUBINSize(program, &mut size), 0);
    let mut image = vec![0; size];
    assert_eq!(nvrtcGetCUBIN(program, image.as_mut_ptr()), 0);
    assert_eq!(nvrtcDestroyProgram(&mut program), 0);
    (status, image)
}

fn function(name: &str) -> u64 {
    let (status, image) = compiled(TEXT, &["--fmad=false", "--gpu-architecture=sm_90"]);
    assert_eq!(status, 0);
    let (mut module, mut function, name) = (0, 0, CString::new(name).unwrap());
    assert_eq!(cuModuleLoadData(&mut module, image.as_ptr().cast()), 0);
    assert_eq!(cuModuleGetFunction(&mut function, module, name.as_ptr()), 0);
    function
}

fn launch(
    function: u64,
    [blocks, threads, shared]: [u32; 3],
    arguments: &[*const c_void],
    stream: u64,
) -> i32 {
    let mut arguments: Vec<*mut c_void> = arguments.iter().map(|place| place.cast_mut()).collect();
    let (places, none) = (arguments.as_mut_ptr(), std::ptr::null_mut());
    cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared, stream, places, none)
}

fn place<T>(of: &T) -> *const c_void {
    std::ptr::from_ref(of).cast()
}

#[test]
fn a_text_computes_and_its_accesses_are_ordered() {
    let program = |waits: bool| {
        move || {
            let [a, b] = [stream(), stream()];
            let (x, y) = (alloc(5, a), alloc(5, a));
            upload(x, &[1.0, 2.0, 3.0, 4.0, 5.0], a);
            if waits {
                follow(b, a);
            }
            assert_eq!(launch(function("twice"), [2, 4, 0], &[place(&5i32), place(&x), place(&y)], b), 0);
            let made = download(y, 5, b);
            cuStreamSynchronize(b);
            if waits {
                assert_eq!(made, [2.0, 4.0, 6.0, 8.0, 10.0]);
            }
        }
    };
    assert_eq!(faults(program(true)), []);
    assert!(faults(program(false)).contains(&Kind::Race));
}

#[test]
fn what_a_text_reads_must_be_written() {
    let program = |written: usize| {
        move || {
            let a = stream();
            let (x, y) = (alloc(8, a), alloc(8, a));
            upload(x, &[1.0; 8][..written], a);
            // The last three elements are not read.
            assert_eq!(launch(function("twice"), [2, 4, 0], &[place(&5i32), place(&x), place(&y)], a), 0);
        }
    };
    assert_eq!(faults(program(5)), []);
    assert_eq!(faults(program(4)), [Kind::Unwritten]);
}

#[test]
fn faults_inside_of_a_launch_are_found() {
    let run = |name: &'static str, count: i32| {
        move || {
            let a = stream();
            let y = alloc(4, a);
            let arguments = [place(&count), place(&y)];
            let arguments = if name == "far" { &arguments[..] } else { &arguments[1..] };
            assert_eq!(launch(function(name), [2, 1, 0], arguments, a), 0);
        }
    };
    // Both blocks write the same element.
    assert_eq!(faults(run("far", 3)), [Kind::Race]);
    assert_eq!(faults(run("far", 4)), [Kind::Memory]);
    assert_eq!(faults(run("same", 0)), [Kind::Race]);
}

#[test]
fn much_shared_memory_is_asked_for() {
    let program = |asks: bool, shared: u32, want: i32| {
        move || {
            let a = stream();
            let y = alloc(4, a);
            let much = function("much");
            if asks {
                assert_eq!(cuFuncSetAttribute(much, 8, shared as i32), 0);
            }
            assert_eq!(launch(much, [1, 4, shared], &[place(&y)], a), want);
            if want == 0 && shared >= 16 {
                let made = download(y, 4, a);
                cuStreamSynchronize(a);
                assert_eq!(made, [3.0, 2.0, 1.0, 0.0]);
            }
        }
    };
    assert_eq!(faults(program(false, 16, code::SUCCESS)), []);
    assert_eq!(faults(program(true, 100_000, 0)), []);
    assert_eq!(faults(program(false, 100_000, code::INVALID_VALUE)), [Kind::Misuse]);
    // 12 bytes for 16.
    assert!(faults(program(false, 12, 0)).contains(&Kind::Memory));
}

#[test]
fn parameters_have_sizes_and_wrong_texts_a_log() {
    let _turn = TURN.lock();
    use_gpu(0);
    let twice = function("twice");
    let size = |at: usize| {
        let (mut offset, mut size) = (0, 0);
        (cuFuncGetParamInfo(twice, at, &mut offset, &mut size), offset, size)
    };
    assert_eq!([size(0), size(1), size(2), size(3)], [(0, 0, 4), (0, 8, 8), (0, 16, 8), (1, 0, 0)]);
    let (mut found, mut module) = (0, 0);
    let (_, image) = compiled(TEXT, &[]);
    assert_eq!(cuModuleLoadData(&mut module, image.as_ptr().cast()), 0);
    assert_eq!(cuModuleGetFunction(&mut found, module, c"thrice".as_ptr()), 500);
    assert_eq!(compiled("__global__ void wrong() { nothing; }", &[]).0, 6);
    assert_eq!(compiled(TEXT, &["--unknown"]).0, 5);
}

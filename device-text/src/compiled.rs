//! Texts of kernels that a C++ compiler has made a library of.
use crate::object::SharedObject;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_uint, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{env, fs, mem};

const HOST: &str = include_str!("host.h");
const RUNTIME: &str = include_str!("runtime.cpp");

/// Flags of the runtime, then those of the text: each of its accesses calls the runtime, and each operation is rounded by itself.
const RUNTIME_FLAGS: &[&str] = &["-std=c++17", "-O2", "-fPIC", "-fno-exceptions", "-U_FORTIFY_SOURCE", "-c"];
const TEXT_FLAGS: &[&str] = &[
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fno-stack-protector",
    "-ffp-contract=off",
    "-fno-fast-math",
    "-fvisibility=hidden",
    "-fsanitize=thread",
    "-w",
    "-c",
];

/// What a parameter of a kernel is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ParameterKind {
    /// A value.
    Value,
    /// A pointer to constants.
    Read,
    /// Another pointer.
    Written,
}

/// A parameter of a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TextParameter {
    /// Its bytes.
    pub size: usize,
    /// What it is.
    pub kind: ParameterKind,
}

/// `EmulatedParameter` of `host.h`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawParameter {
    size: c_uint,
    kind: c_uint,
}

/// `EmulatedKernel` of `host.h`.
#[repr(C)]
pub(crate) struct RawKernel {
    name: *const c_char,
    count: c_uint,
    parameters: [RawParameter; 64],
    pub(crate) call: extern "C" fn(*const c_void, *const *mut c_void),
    function: *const c_void,
}

/// A kernel of a text.
pub(crate) struct TextKernel {
    pub(crate) raw: *const RawKernel,
    pub(crate) name: std::ffi::CString,
    pub(crate) parameters: Vec<TextParameter>,
}

/// The kernels of a text, compiled for the host.
pub struct DeviceText {
    kernels: HashMap<String, TextKernel>,
    object: SharedObject,
    /// The runtime has one launch at a time.
    pub(crate) turn: Mutex<()>,
}

// SAFETY: the pointers are to constants of the loaded library, which stays; its other state is used by one thread at a time, see `turn`.
unsafe impl Send for DeviceText {}
// SAFETY: as above.
unsafe impl Sync for DeviceText {}

impl DeviceText {
    /// Compiles a text, or takes it from an earlier process of this build.
    ///
    /// # Errors
    /// What the compiler says, or that there is none; `CXX` names it, and otherwise it is `c++`.
    pub fn compile(text: &str) -> Result<Self, String> {
        let folder = folder()?;
        let [path, runtime] = [text, ""].map(|text| folder.join(format!("{:016x}", key(text))));
        if !path.with_extension("so").exists() {
            build(text, &path, &runtime)?;
        }
        Self::load(&path.with_extension("so"))
    }

    /// Compiles a text for a test. `None`, and a line that says so, if there is no C++ compiler.
    ///
    /// # Panics
    /// If the compiler refuses the text.
    pub fn for_test(text: &str) -> Option<Self> {
        if Command::new(compiler()).arg("--version").output().is_err() {
            eprintln!("SKIPPED needs a C++ compiler, and {} cannot be started", compiler());
            return None;
        }
        match Self::compile(text) {
            Ok(text) => Some(text),
            Err(error) => panic!("{error}"),
        }
    }

    fn load(path: &Path) -> Result<Self, String> {
        type Listed = extern "C" fn(*mut c_uint) -> *const RawKernel;
        let object = SharedObject::open(path)?;
        // SAFETY: `wrapped` defines the function with this type.
        let kernels: Listed =
            unsafe { mem::transmute::<NonNull<c_void>, Listed>(object.function(c"emulated_kernels")?) };
        let mut count = 0;
        let first = kernels(&raw mut count);
        // SAFETY: the function returns as many constants of the library, which stays loaded.
        let raw = unsafe { std::slice::from_raw_parts(first, count as usize) };
        let kernel = |raw: &RawKernel| {
            // SAFETY: the name is a literal of the library.
            let name = unsafe { CStr::from_ptr(raw.name) }.to_owned();
            let parameter = |raw: &RawParameter| TextParameter {
                size: raw.size as usize,
                kind: match raw.kind {
                    0 => ParameterKind::Value,
                    1 => ParameterKind::Read,
                    _ => ParameterKind::Written,
                },
            };
            let parameters = raw.parameters[..raw.count as usize].iter().map(parameter).collect();
            (name.to_string_lossy().into_owned(), TextKernel { raw, name, parameters })
        };
        Ok(Self { kernels: raw.iter().map(kernel).collect(), object, turn: Mutex::new(()) })
    }

    /// The names of the kernels, in alphabetical order.
    pub fn kernels(&self) -> Vec<&str> {
        let mut names: Vec<_> = self.kernels.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    /// The parameters of a kernel; `None` if the text has no such kernel.
    pub fn parameters(&self, kernel: &str) -> Option<&[TextParameter]> {
        self.kernel(kernel).map(|kernel| &kernel.parameters[..])
    }

    pub(crate) fn kernel(&self, name: &str) -> Option<&TextKernel> {
        self.kernels.get(name)
    }

    pub(crate) fn object(&self) -> &SharedObject {
        &self.object
    }
}

/// The name of a library in the folder: other texts, compilers and flags give other names.
fn key(text: &str) -> u64 {
    let mut hash = DefaultHasher::new();
    (text, HOST, RUNTIME, TEXT_FLAGS, RUNTIME_FLAGS, compiler()).hash(&mut hash);
    hash.finish()
}

fn compiler() -> String {
    env::var("CXX").unwrap_or_else(|_| "c++".into())
}

/// The folder of libraries: beside the programs of the build, or where those cannot be written one of this process.
fn folder() -> Result<PathBuf, String> {
    let program = env::current_exe().map_err(|error| error.to_string())?;
    let beside = program.ancestors().skip(1).find(|folder| !folder.ends_with("deps")).map(Path::to_path_buf);
    let own = env::temp_dir().join(format!("device-text-{}", std::process::id()));
    let folders = beside.map(|folder| folder.join("device-text")).into_iter().chain([own]);
    let mut why = String::new();
    for folder in folders {
        match fs::create_dir_all(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) => why = format!("{}: {error}", folder.display()),
        }
    }
    Err(why)
}

/// Compiles a text, and the runtime if there is none yet, and links them.
fn build(text: &str, path: &Path, runtime: &Path) -> Result<(), String> {
    // Each process has files of its own until they are whole: others build too.
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = format!("{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    let part = |path: &Path, kind: &str| path.with_extension(format!("{number}.{kind}"));
    let (source, object, library) = (part(path, "cpp"), part(path, "o"), part(path, "so"));
    let (runtime_source, runtime_part) = (part(runtime, "cpp"), part(runtime, "o"));
    let runtime_object = runtime.with_extension("o");
    if !runtime_object.exists() {
        write(&runtime_source, RUNTIME)?;
        compile(RUNTIME_FLAGS, &runtime_source, &runtime_part)?;
        rename(&runtime_part, &runtime_object)?;
    }
    write(&source, &wrapped(text, &names(text, &source)?))?;
    compile(TEXT_FLAGS, &source, &object)?;
    // Without the sanitizer's own runtime.
    run(Command::new(compiler()).args(["-shared", "-Wl,-Bsymbolic", "-o"]).args([
        &library,
        &object,
        &runtime_object,
    ]))?;
    rename(&library, &path.with_extension("so"))?;
    for done in [source, object, runtime_source] {
        let _ = fs::remove_file(done); // what is left costs only space
    }
    Ok(())
}

/// The text as C++, with a function that lists its kernels. Names of a text are its own: they may be those of the C library.
fn wrapped(text: &str, names: &[String]) -> String {
    let list: String = names.iter().map(|name| format!("emulated_kernel(\"{name}\", {name}), ")).collect();
    [
        HOST,
        "\nnamespace {\n#line 1 \"kernels\"\n",
        text,
        "\n}\nextern \"C\" __attribute__((visibility(\"default\"), no_sanitize_thread))\n",
        "const EmulatedKernel* emulated_kernels(unsigned* count) {\n  static const EmulatedKernel all[] = {",
        &list,
        "};\n  *count = sizeof all / sizeof *all;\n  return all;\n}\n",
    ]
    .concat()
}

/// The names of the kernels: what follows `__global__ void` where macros are replaced.
fn names(text: &str, scratch: &Path) -> Result<Vec<String>, String> {
    write(scratch, &format!("#define DYNAMIC_SHARED(T, name)\n#define EMULATED 1\n{text}"))?;
    let plain = run(Command::new(compiler()).args(["-E", "-P", "-x", "c++", "-w"]).arg(scratch))?;
    let plain = String::from_utf8_lossy(&plain.stdout).into_owned();
    let after = |part: &str| {
        let (_, rest) = part.split_once("void")?;
        let mut rest = rest.trim_start();
        if let Some(bounds) = rest.strip_prefix("__launch_bounds__") {
            rest = bounds.split_once(')')?.1.trim_start();
        }
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_')?;
        Some(rest[..end].to_string())
    };
    let found: Vec<_> = plain.split("__global__").skip(1).filter_map(after).collect();
    if found.is_empty() { Err("the text has no kernels".to_string()) } else { Ok(found) }
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

fn rename(from: &Path, to: &Path) -> Result<(), String> {
    fs::rename(from, to).map_err(|error| format!("{}: {error}", to.display()))
}

fn compile(flags: &[&str], source: &Path, object: &Path) -> Result<(), String> {
    run(Command::new(compiler()).args(flags).arg(source).arg("-o").arg(object)).map(|_| ())
}

fn run(command: &mut Command) -> Result<Output, String> {
    let output = command.output().map_err(|error| format!("{}: {error}", compiler()))?;
    if output.status.success() {
        return Ok(output);
    }
    Err(format!("{} refuses the kernels: {}", compiler(), String::from_utf8_lossy(&output.stderr)))
}

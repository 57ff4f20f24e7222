//! Libraries that are loaded at run time.
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(object: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlerror() -> *const c_char;
}

/// `RTLD_NOW`, by which a name that is missing is an error here.
const NOW: c_int = 2;

/// A loaded library. It stays loaded: others may hold its functions.
pub(crate) struct SharedObject(NonNull<c_void>);

impl SharedObject {
    /// Loads a library.
    pub(crate) fn open(path: &Path) -> Result<Self, String> {
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
        // SAFETY: the name is zero-terminated, and the library, which this crate has built, runs nothing while it is loaded.
        let object = NonNull::new(unsafe { dlopen(name.as_ptr(), NOW) });
        object.map(Self).ok_or_else(reason)
    }

    /// Returns the address of a function.
    pub(crate) fn function(&self, name: &CStr) -> Result<NonNull<c_void>, String> {
        // SAFETY: the object is loaded, and the name is zero-terminated.
        NonNull::new(unsafe { dlsym(self.0.as_ptr(), name.as_ptr()) }).ok_or_else(reason)
    }
}

/// Why the last call failed.
fn reason() -> String {
    // SAFETY: it returns null or a zero-terminated text that lasts until the next call of this thread.
    let text = unsafe { dlerror() };
    if text.is_null() {
        return "a library cannot be loaded".to_string();
    }
    // SAFETY: it is not null, see above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

// cargo reads the build dependencies of a package with a build script only.
fn main() {}

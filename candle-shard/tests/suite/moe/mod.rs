mod balance;
mod checkpoints;
mod counts;
mod errors;
mod harness;
mod meshes;
mod parity;
mod shapes;

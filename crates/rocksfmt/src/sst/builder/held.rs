//! Data blocks that are held back until there are enough of them to choose a dictionary.

use std::fmt;

use crate::block::compress::CodecOptions;

/// Most bytes of blocks that are held back, whatever the options say.
const HELD_BYTES_MAX: usize = 4 << 20;

/// The blocks, uncompressed, and the part of them that was released.
#[derive(Clone, Debug)]
pub(crate) struct HeldBlocks {
    bytes: Vec<u8>,
    ends: Vec<usize>,
    bytes_max: usize,
    options: CodecOptions,
}

impl HeldBlocks {
    pub fn new(options: CodecOptions) -> HeldBlocks {
        let bytes_max = match options.buffer_bytes {
            0 => HELD_BYTES_MAX,
            bytes => bytes.min(HELD_BYTES_MAX),
        };
        HeldBlocks { bytes: Vec::new(), ends: Vec::new(), bytes_max, options }
    }

    pub fn push(&mut self, block: &[u8]) {
        self.bytes.extend_from_slice(block);
        self.ends.push(self.bytes.len());
    }

    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    pub fn is_full(&self) -> bool {
        self.bytes.len() >= self.bytes_max
    }

    /// A block by its number.
    pub fn block(&self, at: usize) -> Option<&[u8]> {
        let start = if at == 0 { 0 } else { self.ends[at - 1] };
        Some(&self.bytes[start..*self.ends.get(at)?])
    }

    /// The dictionary for these blocks, or how to make it; empty if they are too few.
    pub fn dictionary(&self) -> Dictionary {
        let CodecOptions { dictionary_bytes, train_bytes, .. } = self.options;
        if train_bytes == 0 {
            return Dictionary::Made(self.samples(dictionary_bytes).0);
        }
        let (samples, sizes) = self.samples(train_bytes);
        // Options may ask for more than there is memory.
        let bytes_max = dictionary_bytes.min(samples.len());
        Dictionary::Trained(DictionaryTraining { samples, sizes, bytes_max })
    }

    /// Blocks of about `wanted` bytes, from everywhere among those held back, and their sizes.
    fn samples(&self, wanted: usize) -> (Vec<u8>, Vec<usize>) {
        let count = self.ends.len();
        let average = (self.bytes.len() / count.max(1)).max(1);
        let taken = wanted.div_ceil(average).min(count);
        let (mut samples, mut sizes) = (Vec::new(), Vec::new());
        for block in (0..taken).filter_map(|i| self.block(i * count / taken)) {
            let len = block.len().min(wanted - samples.len());
            samples.extend_from_slice(&block[..len]);
            sizes.push(len);
            if samples.len() == wanted {
                break;
            }
        }
        (samples, sizes)
    }
}

/// A dictionary, or how to make it.
pub(crate) enum Dictionary {
    Made(Vec<u8>),
    Trained(DictionaryTraining),
}

impl Dictionary {
    pub fn make(self) -> Vec<u8> {
        match self {
            Dictionary::Made(dictionary) => dictionary,
            Dictionary::Trained(training) => training.run(),
        }
    }
}

/// Training of a dictionary. It takes long: 40 ms for 400 KiB of samples, and 200 ms and more for
/// 4 MiB, on a processor of 2023.
pub struct DictionaryTraining {
    samples: Vec<u8>,
    sizes: Vec<usize>,
    bytes_max: usize,
}

impl DictionaryTraining {
    /// The dictionary; empty if the samples are too few. Always the same for the same samples.
    pub fn run(&self) -> Vec<u8> {
        zstd::dict::from_continuous(&self.samples, &self.sizes, self.bytes_max).unwrap_or_default()
    }
}

impl fmt::Debug for DictionaryTraining {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DictionaryTraining")
            .field("samples", &self.sizes.len())
            .field("bytes_max", &self.bytes_max)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_come_from_everywhere_and_keep_their_limit() {
        let options = CodecOptions { dictionary_bytes: 1000, ..CodecOptions::default() };
        let mut held = HeldBlocks::new(options);
        for i in 0..100u8 {
            held.push(&[i; 150]);
        }
        let dictionary = held.dictionary().make();
        assert_eq!(dictionary.len(), 1000);
        assert_eq!((dictionary[0], dictionary[999]), (0, 85));
        assert!(!held.is_full());
        let few = HeldBlocks::new(options).dictionary().make();
        assert!(few.is_empty());
    }

    #[test]
    fn a_dictionary_is_not_larger_than_what_it_is_made_of() {
        let options = CodecOptions {
            dictionary_bytes: usize::MAX,
            train_bytes: usize::MAX,
            ..CodecOptions::default()
        };
        let mut held = HeldBlocks::new(options);
        for i in 0..100u8 {
            held.push(&[i; 150]);
        }
        assert!(held.dictionary().make().len() <= 100 * 150);
    }
}

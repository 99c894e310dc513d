// The binary form of the server's answers: see qkflow/explore/payload.py.
const ARRAYS = { uint8: Uint8Array, int8: Int8Array, float32: Float32Array };

export function decodePayload(buffer, begin = 0) {
  const length = new DataView(buffer, begin).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, begin + 4, length)));
  const tensors = {};
  for (const [name, entry] of Object.entries(header.tensors)) {
    const type = ARRAYS[entry.dtype];
    let offset = begin + 4 + length + entry.offset;
    tensors[name] = entry.shapes.map(shape => {
      const count = shape.reduce((a, b) => a * b, 1);
      const values = new type(buffer, offset, count);
      offset += count * type.BYTES_PER_ELEMENT;
      return { shape, values };
    });
  }
  return { header, tensors };
}

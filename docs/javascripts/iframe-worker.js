/* Browsers do not start workers from files: opened from the disk, the search runs in a hidden frame.
   The theme's search recognises the name IFrameWorker. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      const inside = (this.inside = frame.contentWindow)
      inside.document.open()
      inside.document.write("<!doctype html><body></body>")
      inside.document.close()
      inside.postMessage = message => this.answer(message)
      inside.importScripts = (...urls) =>
        urls.reduce((before, one) => before.then(() => this.load(one)), Promise.resolve())
      this.ready = this.load(url)
    }

    load(url) {
      return new Promise((done, failed) => {
        const script = this.inside.document.createElement("script")
        Object.assign(script, { src: url, onload: done, onerror: failed })
        this.inside.document.body.append(script)
      })
    }

    answer(data) {
      const message = new MessageEvent("message", { data })
      this.dispatchEvent(message)
      if (this.onmessage) this.onmessage(message)
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.inside.frameElement.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
